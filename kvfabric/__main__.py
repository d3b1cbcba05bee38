"""The command line: `kvfabric demo | bench | sweep`."""

import contextlib
import os
import sys
import traceback
from collections.abc import Generator
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from .actors.demo import defaults
from .fabric.clock import SystemClock
from .fabric.errors import ConfigError, FabricError, Malformed, Refused

if TYPE_CHECKING:
    from .actors.demo.tally import Tally

app = typer.Typer(
    no_args_is_help=True, add_completion=False, help="One KV cache for a fleet of LLM engines."
)

PLOT_NAME = "kvfabric-demo.png"
PLOT_SUFFIXES = (".png", ".svg", ".pdf", ".jpg")
"""What matplotlib writes without further packages."""


Debug = Annotated[bool, typer.Option("--debug", help="With an error, show where it comes from.")]


class Network(str, Enum):  # noqa: UP042 (typer reads the value of a str enum)
    """Where the demo's cluster listens."""

    PRIVATE = "private"
    HOST = "host"


@app.callback()
def face() -> None:
    """One KV cache for a fleet of LLM engines on a Ray cluster."""


@app.command()
def demo(  # noqa: PLR0913 (each is an option of the command)
    trace: Annotated[
        Path | None,
        typer.Option(help="A trace in Mooncake's format; without one, multi-turn chat."),
    ] = None,
    scale: Annotated[float, typer.Option(help="Shrinks all lengths: n/512.")] = defaults.SCALE,
    requests: Annotated[
        int, typer.Option(help="Requests taken from the trace.")
    ] = defaults.TRACE_REQUESTS,
    conversations: Annotated[
        int, typer.Option(help="Conversations, without a trace.")
    ] = defaults.CONVERSATIONS,
    turns: Annotated[int, typer.Option(help="Turns of each conversation.")] = defaults.TURNS,
    output_tokens: Annotated[
        int, typer.Option(help="Tokens generated at most, per turn.")
    ] = defaults.OUTPUT_TOKENS_MAX,
    chunk_tokens: Annotated[int, typer.Option(help="Tokens of a chunk.")] = defaults.CHUNK_TOKENS,
    block_tokens: Annotated[
        int, typer.Option(help="Tokens of an engine block.")
    ] = defaults.BLOCK_TOKENS,
    workers: Annotated[
        int, typer.Option(help="Prefill workers, and as many for decode.")
    ] = defaults.WORKERS,
    seed: Annotated[int, typer.Option(help="Of the model and the workload.")] = 0,
    region_bytes: Annotated[
        int | None, typer.Option(help="Of each pool; default: 60% of what is needed.")
    ] = None,
    plot: Annotated[Path, typer.Option(help="Where the picture goes.")] = Path(PLOT_NAME),
    network: Annotated[
        Network, typer.Option(help="private: loopback only; host: Ray's way.")
    ] = Network.PRIVATE,
    *,
    kill: Annotated[bool, typer.Option(help="Kill a pool, then a whole node, on the way.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="End with one JSON object.")] = False,
    debug: Debug = False,
) -> None:
    """Two nodes of a local Ray cluster share one KV cache; every token is checked."""
    with explained(debug=debug):
        require_place(plot)
        settle_ray(network)
        from .actors.demo.options import DemoOptions
        from .actors.demo.run import run

        console = Console(stderr=as_json)
        options = DemoOptions(
            trace=trace,
            scale=scale,
            requests=requests,
            conversations=conversations,
            turns=turns,
            output_tokens_max=output_tokens,
            prefill_workers=workers,
            decode_workers=workers,
            chunk_tokens=chunk_tokens,
            block_tokens=block_tokens,
            seed=seed,
            kill=kill,
            region_bytes=region_bytes,
        )
        tally = run(options, console, SystemClock())
        raise typer.Exit(picture_and_figures(tally, plot, console, as_json=as_json))


@contextlib.contextmanager
def explained(*, debug: bool) -> Generator[None]:
    """With `debug`, show where an error of the fabric comes from, before it becomes a sentence."""
    try:
        yield
    except FabricError as error:
        if debug:
            traceback.print_exception(error)
        raise


def picture_and_figures(tally: "Tally", plot: Path, console: Console, *, as_json: bool) -> int:
    """Draw and print, and return the exit code; a picture that fails costs no figures."""
    from .actors.demo.plot import draw
    from .actors.demo.view import finish

    undrawn: Exception | None = None
    try:
        draw(tally, plot)
        console.print(f"picture: {plot}")
    except (OSError, ValueError) as error:
        undrawn = error
    code = finish(tally, console, as_json=as_json)
    if undrawn is not None:
        raise ConfigError("plot", f"{plot}: {undrawn}", "Name another") from undrawn
    return code


def settle_ray(network: Network) -> None:
    """What must be said before Ray is imported: how much it tells, and where it listens."""
    from .actors.netns import Isolation, isolate_network
    from .actors.quiet import quiet_ray

    quiet_ray()
    if network is Network.PRIVATE and isolate_network() is Isolation.HOST:
        typer.echo("no private network here; Ray listens on this host's address", err=True)


def require_place(plot: Path) -> None:
    """Refuse, before a minute of work, what can be seen not to become a picture."""
    folder = plot.absolute().parent
    if not folder.is_dir():
        raise ConfigError("plot", f"{plot.parent} is no folder", "Make it, or name another")
    if plot.is_dir():
        raise ConfigError("plot", f"{plot} is a folder", "Name a file in it")
    if not os.access(plot if plot.exists() else folder, os.W_OK):
        raise ConfigError("plot", f"{plot} cannot be written", "Name another")
    if plot.suffix.lower() not in PLOT_SUFFIXES:
        known = ", ".join(PLOT_SUFFIXES)
        raise ConfigError("plot", f"{plot} ends with none of {known}", "Name such a file")


@app.command()
def bench(
    name: Annotated[str, typer.Argument(help="pool, p2p, or vllm (in .venv-vllm)")],
    *,
    as_json: Annotated[bool, typer.Option("--json", help="JSON lines instead of a table.")] = False,
    debug: Debug = False,
) -> None:
    """Measure, beside a peer or a physical limit in the same run."""
    from .actors.bench import BENCHES
    from .actors.bench.rows import show

    if name not in BENCHES:
        raise typer.BadParameter(f"{name!r} is none of: {', '.join(BENCHES)}")
    console = Console(stderr=as_json)
    with explained(debug=debug), console.status(f"measuring {name}"):
        try:
            rows = BENCHES[name](SystemClock())
        except MemoryError as error:
            raise Refused("memory", f"none is left: {error}", "Free some.") from error
    show(rows, Console(), as_json=as_json)


@app.command()
def sweep(
    directory: Annotated[str, typer.Option(help="Where regions lie.")] = "/dev/shm",
    run: Annotated[str | None, typer.Option(help="Only this fabric's; default: all.")] = None,
) -> None:
    """Remove regions that no pool holds and no process has mapped."""
    from .tiers.pool.sweep import sweep as sweep_files

    try:
        removed = sweep_files(directory, run)
    except OSError as error:
        raise ConfigError("directory", str(error), "Name the pools' host.directory") from error
    for swept in removed:
        typer.echo(f"removed {swept.path} ({swept.freed_bytes} bytes)")
    if not removed:
        typer.echo("nothing to remove", err=True)


def main() -> None:
    """Run the command line. An error of the fabric is one sentence, and an exit code.

    2 says that what was asked cannot be done anywhere; 1 that it could not be done here and now.
    """
    try:
        app()
    except FabricError as error:
        typer.echo(f"kvfabric: {' '.join(str(error).split())}", err=True)
        asked_wrongly = isinstance(error, ConfigError | Malformed) and not isinstance(
            error, Refused
        )
        sys.exit(2 if asked_wrongly else 1)


if __name__ == "__main__":
    main()
