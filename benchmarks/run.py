"""Step time of one GPT unsharded, sharded by this library and by Python FSDP2, and the cost of interception.

Two processes with one thread each throughout; "unsharded" is two independent processes at once, so that all three share
the machine alike. The three take turns, round after round, and each number is the median of its rounds: a machine that
is slow for a while is slow for all of them.
"""

import argparse
import importlib.util
import json
import os
import re
import socket
import statistics
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
NUM_RANKS = 2
TIMEOUT_SECONDS = 600
# width, layers, tokens, batch of each rank; steps and rounds fall as a step gets longer.
CONFIGS = [
    {"dim": 64, "layers": 8, "tokens": 32, "batch": 4, "steps": 40, "rounds": 7},
    {"dim": 256, "layers": 8, "tokens": 128, "batch": 4, "steps": 8, "rounds": 5},
    {"dim": 512, "layers": 6, "tokens": 256, "batch": 4, "steps": 3, "rounds": 3},
]


def name_of(config):
    return "d{dim}_L{layers}_T{tokens}_B{batch}".format(**config)


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def run_ranks(command, joined):
    """Runs the command NUM_RANKS times at once, as ranks of one world or as strangers; returns their outputs."""
    port = str(free_port())
    processes = []
    for rank in range(NUM_RANKS):
        env = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
        env["OMP_NUM_THREADS"] = "1"
        if joined:
            env |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(NUM_RANKS)}
            env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        processes.append(subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True))
    try:
        outputs = [process.communicate(timeout=TIMEOUT_SECONDS)[0] for process in processes]
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
    failed = [process.returncode for process in processes if process.returncode != 0]
    if failed:
        sys.exit(f"error: {' '.join(map(str, command))} ended with {failed[0]}")
    return outputs


def median_ms(command, joined):
    results = [json.loads(line) for text in run_ranks(command, joined) for line in text.splitlines() if line[:1] == "{"]
    return statistics.mean(result["median_ms"] for result in results)


def measure_steps(config, contenders):
    times = {name: [] for name in contenders}
    for _ in range(config["rounds"]):
        for name, (command, joined) in contenders.items():
            sizes = ["--dim", config["dim"], "--num-layers", config["layers"], "--seq-len", config["tokens"]]
            sizes += ["--batch-size", config["batch"], "--steps", config["steps"]]
            times[name].append(median_ms([*command, *map(str, sizes)], joined))
    return {name: statistics.median(values) for name, values in times.items()}


def step_results(build_dir, has_python_torch, only):
    bench = str(build_dir / "benchmarks" / "bench_step")
    contenders = {
        "unsharded": ([bench, "--mode", "unsharded"], False),
        "fsdp.cpp": ([bench, "--mode", "sharded"], True),
    }
    if has_python_torch:
        contenders["python_fsdp2"] = ([sys.executable, str(HERE / "python_fsdp2.py")], True)
    else:
        print("Python's torch is not there: its column is left out")
    print(f"{'config':<18}" + "".join(f"{name + ' ms':>18}" for name in contenders) + f"{'R1':>8}{'R2':>8}")
    results = []
    for config in CONFIGS:
        if not re.search(only, name_of(config)):
            continue
        times = measure_steps(config, contenders)
        ratios = {"R1": times["fsdp.cpp"] / times["unsharded"]}
        if has_python_torch:
            ratios["R2"] = times["python_fsdp2"] / times["fsdp.cpp"]
        print(f"{name_of(config):<18}" + "".join(f"{value:>18.2f}" for value in times.values())
              + "".join(f"{value:>8.3f}" for value in ratios.values()), flush=True)
        results += [(f"step_{name}", name_of(config), value, "ms") for name, value in times.items()]
        results += [(name, name_of(config), value, "ratio") for name, value in ratios.items()]
    print("R1 = fsdp.cpp / unsharded, R2 = Python FSDP2 / fsdp.cpp")
    return results


def interception_results(build_dir):
    output = subprocess.run([str(build_dir / "benchmarks" / "bench_interception")], check=True, text=True,
                            stdout=subprocess.PIPE, env=os.environ | {"OMP_NUM_THREADS": "1"}).stdout
    print(output, end="")
    fields = (line.split() for line in output.splitlines() if line.startswith("interception_"))
    return [(name, config, float(value), unit) for name, config, value, unit in fields]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the numbers there too")
    parser.add_argument("--build-dir", type=Path, required=True)
    parser.add_argument("--only", default="", metavar="REGEX", help="step configs to run, such as d64")
    args = parser.parse_args()

    results = step_results(args.build_dir, importlib.util.find_spec("torch") is not None, args.only)
    results += interception_results(args.build_dir)
    if args.json:
        keys = ("name", "config", "value", "unit")
        args.json.write_text(json.dumps([dict(zip(keys, row)) for row in results], indent=2) + "\n")
        print(f"wrote {args.json}")


if __name__ == "__main__":
    main()
