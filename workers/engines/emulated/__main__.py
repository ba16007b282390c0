"""`python -m workers.engines.emulated`: several emulated workers in one process."""

import argparse
import asyncio
import json
import signal
import sys

import uvloop

from workers.engines.emulated.fleet import Fleet
from workers.engines.emulated.worker import EngineConfig, WorkerSpec


def _worker(text: str) -> WorkerSpec:
    parts = text.split(":")
    if len(parts) != 3 or parts[1] not in ("prefill", "decode", "both") or not parts[2].isdigit():
        raise argparse.ArgumentTypeError(
            f"{text!r} is no ID:prefill|decode|both:PORT, for instance p1:prefill:8101"
        )
    return WorkerSpec(parts[0], parts[1], int(parts[2]))  # type: ignore[arg-type]  # checked above


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m workers.engines.emulated", description=__doc__)
    parser.add_argument("--worker", type=_worker, action="append", required=True,
                        metavar="ID:ROLE:PORT", help="repeatable; port 0 takes a free one")  # fmt: skip
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--model", required=True, help="name that clients send")
    parser.add_argument("--model-path", help="folder with tokenizer.json for real token counts")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--prefill-ms-per-token", type=float, default=0.2)
    parser.add_argument("--decode-ms", type=float, default=5.0)
    parser.add_argument("--block-tokens", type=int, default=64, help="tokens of a pool block")
    parser.add_argument("--max-model-len", type=int, default=8192)
    parser.add_argument("--enable-prompt-tokens-details", action="store_true")
    parser.add_argument("--agent-socket", help="node agent (path): use its pool for real")
    parser.add_argument("--weights-version", default="emulated")
    return parser


async def _run(args: argparse.Namespace) -> None:
    config = EngineConfig(
        model=args.model,
        model_path=args.model_path,
        seed=args.seed,
        prefill_ms_per_token=args.prefill_ms_per_token,
        decode_ms=args.decode_ms,
        block_tokens=args.block_tokens,
        max_model_len=args.max_model_len,
        prompt_tokens_details=args.enable_prompt_tokens_details,
    )
    fleet = Fleet(args.worker, config, args.agent_socket, args.weights_version)
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    await fleet.start(args.host)
    print(json.dumps({"ready": True, "emulated": True, "workers": fleet.urls}), flush=True)  # noqa: T201 - the ready line
    await stop.wait()
    await fleet.stop()


def main(argv: list[str] | None = None) -> int:
    """Serve until SIGTERM. Exit code 1 when a port cannot be had."""
    args = _parser().parse_args(argv)
    try:
        uvloop.run(_run(args))
    except OSError as error:
        print(f"cannot listen: {error}; choose another port", file=sys.stderr)  # noqa: T201 - a CLI's error
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
