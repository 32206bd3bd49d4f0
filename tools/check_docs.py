"""Checks that relative links in the documents lead somewhere and that every header opens with a comment."""

import pathlib
import re
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
SKIPPED = {"build", ".venv", ".git", ".cache"}
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
HEADING = re.compile(r"^#+ +(.*)", re.MULTILINE)


def files(suffix):
    for path in sorted(ROOT.rglob("*" + suffix)):
        if not SKIPPED & set(path.relative_to(ROOT).parts):
            yield path


def without_code(text):
    return re.sub(r"```.*?```", "", text, flags=re.DOTALL)


def anchors(text):
    for heading in HEADING.findall(without_code(text)):
        kept = re.sub(r"[^\w\- ]", "", heading.strip().lower())
        yield kept.replace(" ", "-")


def broken_links(page):
    for link in LINK.findall(without_code(page.read_text())):
        if re.match(r"[a-z]+:", link):
            continue
        target, _, anchor = link.partition("#")
        path = (page.parent / target).resolve() if target else page
        if not path.exists():
            yield f"{page.relative_to(ROOT)}: link to {link}, which does not exist"
        elif anchor and path.suffix == ".md" and anchor not in anchors(path.read_text()):
            yield f"{page.relative_to(ROOT)}: link to {link}, but {target or 'the page'} has no such heading"


def headers_without_comment():
    for header in files(".h"):
        lines = [line for line in header.read_text().splitlines() if line.strip()]
        body = lines[1:] if lines[:1] == ["#pragma once"] else lines
        if not body or not body[0].startswith(("//", "/*")):
            yield f"{header.relative_to(ROOT)}: opens without a comment that says what it holds"


def main():
    pages = list(files(".md"))
    problems = [problem for page in pages for problem in broken_links(page)]
    problems += headers_without_comment()
    for problem in problems:
        print("error:", problem, file=sys.stderr)
    if problems:
        sys.exit(1)
    print(f"==> {len(pages)} documents and all headers are in order")


main()
