"""Groups C++ files into few translation units for clang-tidy.

usage: lint_units.py BUILD_DIR FILE...

Reading LibTorch's headers costs clang-tidy minutes, so files with the same compile flags share one unit that includes them
all. Writes the units and their compile_commands.json to BUILD_DIR/units and prints the units' paths.
"""

import json
import pathlib
import re
import shlex
import sys

ALONE = {"gloo_backend.cpp"}  # defines what others only declare; outside the unity build too


def flags_of(entry):
    """The command without what is particular to one file: its name and its output."""
    words = shlex.split(entry["command"])
    compiler = next(i for i, word in enumerate(words) if re.search(r"(c\+\+|g\+\+|clang\+\+)[-0-9.]*$", word))
    kept, skip = [], False
    for word in words[compiler:]:
        if skip or word == entry["file"] or word == "-c":
            skip = False
        elif word == "-o":
            skip = True
        else:
            kept.append(word)
    return kept


def main():
    build, files = pathlib.Path(sys.argv[1]).resolve(), [str(pathlib.Path(f).resolve()) for f in sys.argv[2:]]
    known = {entry["file"]: entry for entry in json.loads((build / "compile_commands.json").read_text())}
    groups = {}
    for file in files:
        if file not in known:
            print(f"warning: {file} is not part of the build, so it is not checked", file=sys.stderr)
            continue
        alone = file if pathlib.Path(file).name in ALONE else ""
        groups.setdefault((shlex.join(flags_of(known[file])), alone), []).append(file)

    units = build / "units"
    units.mkdir(exist_ok=True)
    commands = []
    for number, ((flags, _), members) in enumerate(groups.items()):
        unit = units / f"unit_{number}.cpp"
        unit.write_text("".join(f'#include "{member}"\n' for member in members))
        commands.append({"directory": str(build), "file": str(unit), "command": f"{flags} -c {unit}"})
        print(unit)
    (units / "compile_commands.json").write_text(json.dumps(commands, indent=1))


main()
