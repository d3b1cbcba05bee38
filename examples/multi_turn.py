"""Multi-turn conversations on the nodes of a Ray cluster, with and without a shared KV cache.

    ray job submit --working-dir . -- python examples/multi_turn.py

The nodes share one fabric, which is started for the run, or joined if it runs already. With several
nodes the first half of them prefills and the other half decodes; one node does both. Every token is
checked against an engine without the fabric. Prints a table and one JSON object as the last line.
Exit codes: 0; 1 if any token differs; 2 for input or a cluster that cannot be used.
"""

import argparse
import inspect
import sys
from collections.abc import Sequence
from pathlib import Path

import ray
from rich.console import Console

from kvfabric.actors.demo import defaults
from kvfabric.actors.demo.options import DemoOptions, longest_request
from kvfabric.actors.demo.player import Player
from kvfabric.actors.demo.tally import Tally
from kvfabric.actors.demo.view import finish
from kvfabric.actors.fabric import NAMESPACE, Fabric
from kvfabric.actors.nodes import fabric_nodes, listen_addresses
from kvfabric.fabric.clock import SystemClock
from kvfabric.fabric.errors import FabricError

COLUMNS = 100
"""A job's log is no terminal, so the table cannot ask how wide it may be."""


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--conversations", type=int, default=defaults.CONVERSATIONS)
    parser.add_argument("--turns", type=int, default=defaults.TURNS)
    parser.add_argument("--scale", type=float, default=defaults.SCALE, help="of all lengths: n/512")
    parser.add_argument(
        "--output-tokens", type=int, default=defaults.OUTPUT_TOKENS_MAX, help="per turn, at most"
    )
    parser.add_argument("--workers", type=int, default=1, help="of each kind, per node")
    parser.add_argument("--chunk-tokens", type=int, default=defaults.CHUNK_TOKENS)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--run", default="multi-turn", help="the fabric's name")
    parser.add_argument("--files", type=Path, help="a folder for the file tier; default: no files")
    parser.add_argument("--keep", action="store_true", help="leave the fabric running")
    return parser.parse_args()


def options_for(args: argparse.Namespace, nodes: Sequence[str]) -> DemoOptions:
    half = len(nodes) // 2
    return DemoOptions(
        scale=args.scale,
        conversations=args.conversations,
        turns=args.turns,
        output_tokens_max=args.output_tokens,
        prefill_workers=args.workers,
        decode_workers=args.workers,
        prefill_nodes=tuple(nodes[:half] or nodes),
        decode_nodes=tuple(nodes[half:]),
        chunk_tokens=args.chunk_tokens,
        seed=args.seed,
    )


def play(args: argparse.Namespace, console: Console) -> Tally:
    nodes = fabric_nodes(ray.nodes())
    options = options_for(args, [node.name for node in nodes])
    settings = options.settings(longest_request(options.workload()))
    pools = options.pools(args.run, settings, args.files, listen_addresses(nodes))
    fabric = Fabric.start(pools)
    try:
        verb = "joined" if fabric.joined else "started"
        code = Path(inspect.getfile(Fabric)).parent
        console.print(f"{verb} the fabric {args.run!r}; its code: {code}", soft_wrap=True)
        for node, role in options.roles().items():
            console.print(f"  {node}: {role}")
        with Player(options, settings, fabric, SystemClock()) as player:
            player.ready()
            return player.play()
    finally:
        if not (args.keep or fabric.joined):
            fabric.shutdown()


def main() -> int:
    args = arguments()
    console = Console(width=COLUMNS)
    # Without an address: inside a job Ray knows the cluster, elsewhere it starts one.
    ray.init(namespace=NAMESPACE)
    try:
        tally = play(args, console)
    except FabricError as error:
        sys.stderr.write(f"multi_turn: {error}\n")
        return 2
    finally:
        ray.shutdown()
    return finish(tally, console, as_json=True)


if __name__ == "__main__":
    sys.exit(main())
