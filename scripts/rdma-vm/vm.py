#!/usr/bin/env python3
"""Runs a command in a throw-away VM whose kernel has Soft-RoCE, so that RDMA code runs for real.

    scripts/rdma-vm/vm.py [--timeout S] [--mtu N] [--out DIR] 'COMMAND'
    scripts/rdma-vm/vm.py --pair 'COMMAND OF A' 'COMMAND OF B'

QEMU emulates the CPU (no KVM needed). The guest sees this machine's files read-only, with a layer
in memory for what it writes; only $OUT leads back here. It has one RDMA device, rxe0: alone on
10.99.0.1, in a pair on 10.98.0.1 (A) and 10.98.0.2 (B), one wire between them.

Ends with the command's status (of a pair: the first that is not 0); 124 after the time-out, 125
where a guest died before its command ended, 2 where something is missing here.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import fcntl
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

HERE = Path(__file__).resolve().parent
CACHE = HERE.parents[1] / ".cache" / "rdma-vm"
PACKAGES = (
    "qemu-system-x86", "seabios", "busybox-static", "kmod", "cpio", "iproute2", "rdma-core",
    "ibverbs-providers", "ibverbs-utils", "perftest", "python3-pyverbs",
)  # fmt: skip
MODULES = (
    "virtio_pci", "virtio_console", "virtio_rng", "9pnet_virtio", "9p", "overlay", "virtio_net",
    "dummy", "ib_core", "ib_uverbs", "crc32_generic", "rdma_rxe",
)  # fmt: skip
# The cloud kernel lacks rdma_rxe and 9p.
KERNEL_PACKAGE = "linux-image-amd64"
UNPACKED = (
    "./boot/vmlinuz*", "./lib/modules/*/modules.*", "./lib/modules/*/kernel/crypto*",
    "./lib/modules/*/kernel/lib*", "./lib/modules/*/kernel/net*", "./lib/modules/*/kernel/fs*",
    "./lib/modules/*/kernel/drivers/infiniband*", "./lib/modules/*/kernel/drivers/net/*.ko",
    "./lib/modules/*/kernel/drivers/virtio*", "./lib/modules/*/kernel/drivers/char/*",
    "./lib/modules/*/kernel/arch/x86/crypto*",
)  # fmt: skip
KERNEL_OPTIONS = (
    "console=ttyS0 quiet panic=-1 mitigations=off nokaslr no_timer_check random.trust_cpu=on"
)
TIMED_OUT, DIED, UNUSABLE = 124, 125, 2
_PR_SET_PDEATHSIG = 1


class UnusableError(Exception):
    """This machine cannot run the VM; the text says what to do."""


@dataclass
class Guest:
    """One VM: what it runs and how. `name` A or B of a pair, else empty."""

    command: str
    folder: Path
    mtu: int
    cpus: int
    memory_mb: int
    name: str = ""
    preloads: list[Path] = field(default_factory=list)
    wire: Path | None = None

    @property
    def out(self) -> Path:
        return self.folder / "out"

    @property
    def address(self) -> str:
        return {"": "10.99.0.1", "A": "10.98.0.1", "B": "10.98.0.2"}[self.name]


def main() -> int:
    options = _options()
    _die_with_parent(signal.SIGTERM)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(TIMED_OUT))  # ends the guests on the way out
    try:
        check_packages()
        kernel, initramfs = prepare()
    except (UnusableError, subprocess.CalledProcessError) as error:
        detail = getattr(error, "stderr", None) or ""
        print(f"rdma-vm: {error} {detail}".rstrip(), file=sys.stderr)
        return UNUSABLE
    with _folder(options.out) as folder:
        guests = _guests(options, folder)
        for guest in guests:
            _furnish(guest)
        return _run(guests, kernel, initramfs, options.timeout)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("command", nargs="+", help="for bash; two of them with --pair")
    parser.add_argument("--pair", action="store_true", help="two VMs with a wire between them")
    parser.add_argument("--timeout", type=float, default=300, help="seconds for all (300)")
    parser.add_argument("--mtu", type=int, default=4200, help="of the network device (4200)")
    parser.add_argument("--cpus", type=int, help="of each VM (2; 1 in a pair)")
    parser.add_argument("--memory", type=int, help="MiB of each VM (4096; 2048 in a pair)")
    parser.add_argument("--out", type=Path, help="folder that is $OUT inside; kept afterwards")
    parser.add_argument(
        "--preload", action="append", default=[], type=Path, metavar="FILE.tar",
        help="of absolute paths, laid over the guest's files before the command",
    )  # fmt: skip
    options = parser.parse_args()
    if options.pair != (len(options.command) == 2):
        parser.error("one command, or two with --pair")
    options.cpus = options.cpus or (1 if options.pair else 2)
    options.memory = options.memory or (2048 if options.pair else 4096)
    return options


@contextlib.contextmanager
def _folder(wanted: Path | None) -> Iterator[Path]:
    if wanted is not None:
        wanted.mkdir(parents=True, exist_ok=True)
        yield wanted.resolve()
        return
    with tempfile.TemporaryDirectory(prefix="run-", dir=CACHE) as name:
        yield Path(name)


def _guests(options: argparse.Namespace, folder: Path) -> list[Guest]:
    guests = []
    for name, command in zip("AB" if options.pair else [""], options.command, strict=True):
        guests.append(
            Guest(
                command=command,
                folder=folder / name.lower(),
                mtu=options.mtu,
                cpus=options.cpus,
                memory_mb=options.memory,
                name=name,
                preloads=options.preload,
                wire=folder / "wire" if options.pair else None,
            )
        )
    return guests


# --- what is needed -------------------------------------------------------------------------


def check_packages() -> None:
    """UnusableError names what is missing."""
    query = ["dpkg-query", "-W", "-f=${Package} ${Status}\n", *PACKAGES]
    try:
        reply = subprocess.run(query, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        raise UnusableError("needs Debian: there is no dpkg-query here") from None
    have = {line.split()[0] for line in reply.stdout.splitlines() if line.endswith(" installed")}
    missing = [name for name in PACKAGES if name not in have]
    if missing:
        names = " ".join(missing)
        raise UnusableError(f"apt-get install --no-install-recommends {names}")


def prepare() -> tuple[Path, Path]:
    """Kernel and initramfs, made once. The kernel's package is unpacked, never installed."""
    CACHE.mkdir(parents=True, exist_ok=True)
    kernel, initramfs = CACHE / "vmlinuz", CACHE / "initramfs"
    with (CACHE / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        made = min((f.stat().st_mtime for f in (kernel, initramfs) if f.exists()), default=0)
        recipe = max((HERE / name).stat().st_mtime for name in ("init.sh", "vm.py"))
        if kernel.exists() and initramfs.exists() and made > recipe:
            return kernel, initramfs
        with tempfile.TemporaryDirectory(prefix="build-", dir=CACHE) as name:
            build = Path(name)
            _fetch_kernel(build)
            _make_initramfs(build, initramfs)
            (image,) = (build / "package" / "boot").glob("vmlinuz-*")
            shutil.copy(image, build / "vmlinuz")
            (build / "vmlinuz").replace(kernel)
            os.utime(initramfs)
    return kernel, initramfs


def _fetch_kernel(build: Path) -> None:
    """Unpack what is needed of it into the build folder."""
    try:
        _download(build)
    except (UnusableError, subprocess.CalledProcessError):
        if os.geteuid() != 0:
            raise
        _output("apt-get", "update", "-qq")  # no package lists yet, or old ones
        _download(build)
    (package,) = build.glob("*.deb")
    tree = build / "package"
    tree.mkdir()
    unpack = ["dpkg-deb", "--fsys-tarfile", package]
    with subprocess.Popen(unpack, stdout=subprocess.PIPE) as reader:
        pick = ["tar", "-x", "-C", tree, "--wildcards", *UNPACKED]
        subprocess.run(pick, stdin=reader.stdout, check=True)
    (version,) = (tree / "lib" / "modules").iterdir()
    _output("depmod", "-b", str(tree), version.name)


def _download(folder: Path) -> None:
    listing = _output("apt-cache", "depends", KERNEL_PACKAGE)
    names = [line.split()[1] for line in listing.splitlines() if "Depends:" in line]
    if not names:
        raise UnusableError(f"apt knows no {KERNEL_PACKAGE}: apt-get update")
    as_root = ["-o", "APT::Sandbox::User=root"] if os.geteuid() == 0 else []
    _output("apt-get", *as_root, "download", "-qq", names[0], cwd=folder)


def _make_initramfs(build: Path, target: Path) -> None:
    tree, package = build / "initramfs", build / "package"
    for name in ("bin", "modules", "proc", "sys", "dev", "lower", "layer", "guest"):
        (tree / name).mkdir(parents=True)
    shutil.copy("/bin/busybox", tree / "bin" / "busybox")
    (tree / "bin" / "sh").symlink_to("busybox")
    shutil.copy(HERE / "init.sh", tree / "init")
    (tree / "init").chmod(0o755)
    (version,) = (package / "lib" / "modules").iterdir()
    order: dict[str, None] = {}
    for module in MODULES:
        shown = _output(
            "modprobe", "-d", str(package), "-S", version.name, "--show-depends", module
        )
        for line in shown.splitlines():
            if line.startswith("insmod "):
                file = Path(line.split()[1])
                shutil.copy(file, tree / "modules" / file.name)
                order[file.name] = None
    (tree / "modules" / "order").write_text("".join(f"{name}\n" for name in order))
    names = "\n".join(str(path.relative_to(tree)) for path in sorted(tree.rglob("*")))
    pack = ["cpio", "-o", "-H", "newc", "--quiet"]
    packed = subprocess.run(pack, input=names.encode(), cwd=tree, capture_output=True, check=True)
    (build / "image").write_bytes(packed.stdout)
    (build / "image").replace(target)


def _output(*command: str, cwd: Path | None = None) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=cwd)
    return done.stdout


# --- the run --------------------------------------------------------------------------------


def _furnish(guest: Guest) -> None:
    """Put into $OUT what the guest reads."""
    guest.out.mkdir(parents=True, exist_ok=True)
    (guest.out / "status").unlink(missing_ok=True)
    shutil.copy(HERE / "guest.sh", guest.out)
    (guest.out / "command.sh").write_text(guest.command + "\n")
    for file in guest.preloads:
        shutil.copy(file, guest.out)
    variables = {
        "VM_NETWORK": "pair" if guest.wire else "alone",
        "VM_MTU": str(guest.mtu),
        "VM_ADDRESS": guest.address,
        "VM_PRELOADS": " ".join(file.name for file in guest.preloads),
        "VM_FOLDER": str(Path.cwd()),
    }
    text = "".join(f"{name}={shlex.quote(value)}\n" for name, value in variables.items())
    (guest.out / "guest.env").write_text(text)


def _qemu(guest: Guest, kernel: Path, initramfs: Path) -> list[str]:
    # The guest's own timeouts run while the host computes something else.
    first = ["nice", "-n", "-10"] if os.geteuid() == 0 else []
    command = [
        *first, "qemu-system-x86_64", "-accel", "tcg,thread=multi", "-cpu", "max,la57=off",
        "-machine", "q35", "-smp", str(guest.cpus), "-m", str(guest.memory_mb),
        *_memory_nodes(guest), "-nodefaults", "-no-user-config", "-display", "none", "-no-reboot",
        "-kernel", str(kernel), "-initrd", str(initramfs), "-append", KERNEL_OPTIONS,
        "-serial", f"file:{guest.folder / 'console.log'}",
        "-device", "virtio-serial-pci", "-chardev", "stdio,id=terminal,signal=off",
        "-device", "virtconsole,chardev=terminal", "-device", "virtio-rng-pci",
        "-fsdev", "local,id=root,path=/,security_model=none,readonly=on,multidevs=remap",
        "-device", "virtio-9p-pci,fsdev=root,mount_tag=root",
        "-fsdev", f"local,id=out,path={guest.out},security_model=none",
        "-device", "virtio-9p-pci,fsdev=out,mount_tag=out",
    ]  # fmt: skip
    if guest.wire is not None:
        server = "on" if guest.name == "A" else "off"
        mac = "52:54:00:00:00:01" if guest.name == "A" else "52:54:00:00:00:02"
        command += [
            "-netdev", f"stream,id=wire,server={server},addr.type=unix,addr.path={guest.wire}",
            "-device", f"virtio-net-pci,netdev=wire,host_mtu={guest.mtu},mac={mac}",
        ]  # fmt: skip
    return command


def _memory_nodes(guest: Guest) -> list[str]:
    """Two, with half of the memory and of the CPUs each, where there are two CPUs."""
    if guest.cpus < 2:
        return []
    half, cpus = guest.memory_mb // 2, guest.cpus // 2
    return [
        "-object", f"memory-backend-ram,id=m0,size={half}M",
        "-object", f"memory-backend-ram,id=m1,size={guest.memory_mb - half}M",
        "-numa", f"node,memdev=m0,cpus=0-{cpus - 1}",
        "-numa", f"node,memdev=m1,cpus={cpus}-{guest.cpus - 1}",
    ]  # fmt: skip


def _run(guests: list[Guest], kernel: Path, initramfs: Path, timeout: float) -> int:
    deadline = time.monotonic() + timeout
    with contextlib.ExitStack() as running:
        processes = []
        for guest in guests:
            process = _start(guest, _qemu(guest, kernel, initramfs))
            running.callback(_end, process)
            if guest.name:
                reader = threading.Thread(target=_copy_lines, args=(process, guest.name))
                reader.start()
                running.callback(reader.join)
                running.callback(_end, process)
                _await_wire(guest, process, deadline)
            processes.append(process)
        for process in processes:
            try:
                process.wait(max(0.1, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                print(f"rdma-vm: not done after {timeout:g} s", file=sys.stderr)
                _show_console(guests)
                return TIMED_OUT
    return next((code for code in map(_status, guests) if code), 0)


def _start(guest: Guest, command: list[str]) -> subprocess.Popen[bytes]:
    output = subprocess.PIPE if guest.name else None
    return subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=output,
        preexec_fn=lambda: _die_with_parent(signal.SIGKILL),  # noqa: PLW1509  no threads yet, or readers of pipes
    )


def _die_with_parent(number: int) -> None:
    """Whoever is killed leaves no emulator behind."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(number), 0, 0, 0)


def _await_wire(guest: Guest, process: subprocess.Popen[bytes], deadline: float) -> None:
    """B's end of the wire needs A's to be there."""
    assert guest.wire is not None
    while not guest.wire.exists() and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.02)


def _copy_lines(process: subprocess.Popen[bytes], name: str) -> None:
    assert process.stdout is not None
    for line in process.stdout:
        print(f"{name}| {line.decode(errors='replace').rstrip()}", flush=True)


def _end(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.kill()
    process.wait()


def _status(guest: Guest) -> int:
    file = guest.out / "status"
    if file.exists() and (text := file.read_text().strip()):
        return int(text)
    print("rdma-vm: the guest died before its command ended", file=sys.stderr)
    _show_console([guest])
    return DIED


def _show_console(guests: list[Guest]) -> None:
    for guest in guests:
        log = guest.folder / "console.log"
        lines = log.read_text(errors="replace").splitlines() if log.exists() else []
        for line in lines[-15:]:
            print(f"{guest.name or 'console'}| {line}", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
