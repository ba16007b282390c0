"""`python -m workers.engines.emulated`: several emulated workers in one process."""

import argparse
import asyncio
import json
import signal
import sys
from dataclasses import replace

import uvloop

from workers.core.cost_model import PRESETS, CostModel
from workers.engines.emulated.fleet import Fleet
from workers.engines.emulated.worker import ENGINE_BLOCK_TOKENS, EngineConfig, WorkerSpec


def _worker(text: str) -> WorkerSpec:
    parts = text.split(":")
    if len(parts) != 3 or parts[1] not in ("prefill", "decode", "both") or not parts[2].isdigit():
        raise argparse.ArgumentTypeError(
            f"{text!r} is no ID:prefill|decode|both:PORT, for instance p1:prefill:8101"
        )
    return WorkerSpec(parts[0], parts[1], int(parts[2]))  # type: ignore[arg-type]  # checked above


def _agent(text: str) -> tuple[str, str]:
    worker, equals, address = text.partition("=")
    if not equals or not worker or not address:
        raise argparse.ArgumentTypeError(
            f"{text!r} is no WORKER=ADDRESS, for instance p1=unix:/path"
        )
    return worker, address


def _costs(args: argparse.Namespace) -> CostModel | None:
    if args.cost_model is None:
        return None
    return replace(PRESETS[args.cost_model], scale=args.token_scale, time_factor=args.time_factor)


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
    parser.add_argument("--agent", action="append", default=[], type=_agent,
                        metavar="WORKER=ADDRESS", help="another agent for one worker; repeatable")  # fmt: skip
    parser.add_argument("--weights-version", default="emulated")
    parser.add_argument("--device-blocks", type=int, default=4096,
                        help=f"of {ENGINE_BLOCK_TOKENS} tokens, on the emulated device")  # fmt: skip
    parser.add_argument("--cost-model", choices=sorted(PRESETS),
                        help="measured times instead of the two plain ones")  # fmt: skip
    parser.add_argument("--token-scale", type=int, default=1,
                        help="tokens of the model that one on the wire stands for")  # fmt: skip
    parser.add_argument("--time-factor", type=float, default=1.0, help="stretches all times")
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
        device_blocks=args.device_blocks,
        costs=_costs(args),
    )
    fleet = Fleet(args.worker, config, args.agent_socket, args.weights_version, dict(args.agent))
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
