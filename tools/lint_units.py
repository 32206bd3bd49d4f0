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
MAIN = re.compile(r"^int main\(", re.MULTILINE)  # two of them cannot share a unit


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
    groups, flags_with_main = {}, set()
    for file in files:
        if file not in known:
            print(f"not part of the build, so not checked: {file}", file=sys.stderr)
            continue
        flags = shlex.join(flags_of(known[file]))
        is_program = MAIN.search(pathlib.Path(file).read_text()) is not None
        alone = pathlib.Path(file).name in ALONE or (is_program and flags in flags_with_main)
        if is_program:
            flags_with_main.add(flags)
        groups.setdefault((flags, file if alone else ""), []).append(file)

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
