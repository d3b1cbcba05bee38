"""An engine that does as told: options as a line of JSON, then commands, answers on stdout."""

import importlib.util
import json
import os
import sys
from dataclasses import asdict
from pathlib import Path


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # vLLM and UCX write where they like

    def say(what) -> None:
        answers.write(json.dumps(what) + "\n")
        answers.flush()

    spec = importlib.util.spec_from_file_location("lab", Path(__file__).with_name("lab.py"))
    lab = sys.modules["lab"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(lab)
    with lab.Engine(lab.EngineOptions(**json.loads(sys.stdin.readline()))) as engine:
        say("ready")
        while line := sys.stdin.readline():
            command = json.loads(line)
            match command.pop("do"):
                case "generate":
                    tokens = engine.generate(**command)
                    say({"tokens": tokens, "handed": engine.handed})
                case "hits":
                    say(asdict(engine.hits()))
                case "cached":
                    pool = engine.scheduler.kv_cache_manager.block_pool
                    say([key.hex() for key in pool.cached_block_hash_to_block._cache])
                case "forget":
                    say(engine.forget(**command))
                case other:
                    raise ValueError(f"no such command: {other}")


if __name__ == "__main__":
    main()
