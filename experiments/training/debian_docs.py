"""Extracts prose of Debian's documentation packages as a corpus for experiments.train_small. It has a paragraph per
line, and a blank line between documents.

    python -m experiments.training.debian_docs --out docs.txt

Packages come through apt (a Debian system with its package lists; no root). They are unpacked into a temporary folder,
not installed. Prose is paragraphs of HTML and of plain text that are long enough and end like a sentence, each once.
PACKAGES has each one's license. Models trained on them stay out of this tree, like the packages.
"""

import gzip
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from html.parser import HTMLParser
from pathlib import Path

from experiments.result_file import refusing
from jllm.errors import InputFileError, OutputError
from pallas_kernels.bench.command import Parser

PACKAGES = {
    "debian-faq": "GPL-2+",
    "debian-reference-en": "GPL-2+",
    "developers-reference": "GPL-2+",
    "git-doc": "GPL-2",
    "maint-guide": "GPL-2+",
    "perl-doc": "GPL-1+ or Artistic",
    "python3.11-doc": "PSF-2",
}
LEAST, MOST = 80, 4000  # characters of a paragraph
BLOCKS = {"p", "li", "dd", "dt", "div", "td", "h1", "h2", "h3", "h4", "section", "table", "ul", "ol", "dl", "br"}
HIDDEN = {"script", "style", "head", "pre", "nav"}


class Prose(HTMLParser):
    """The text of a page's blocks, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks: list[str] = [""]
        self.hidden = 0

    def handle_starttag(self, tag: str, attrs: object) -> None:
        self.hidden += tag in HIDDEN
        if tag in BLOCKS:
            self.blocks.append("")

    def handle_endtag(self, tag: str) -> None:
        self.hidden = max(0, self.hidden - (tag in HIDDEN))
        if tag in BLOCKS:
            self.blocks.append("")

    def handle_data(self, data: str) -> None:
        if not self.hidden:
            self.blocks[-1] += data


def paragraphs(text: str, html: bool) -> Iterator[str]:
    """Yields the paragraphs that read as prose, with white space joined."""
    if html:
        page = Prose()
        page.feed(text)
        blocks = page.blocks
    else:
        blocks = re.split(r"\n\s*\n", text)
    for block in blocks:
        words = " ".join(block.replace("¶", " ").split())
        if LEAST <= len(words) <= MOST and re.search(r"[.!?:]['\")]*$", words) and words[0].isalpha():
            yield words


def documents(folder: Path) -> Iterator[list[str]]:
    """Yields the paragraphs of each file of an unpacked package, sorted by path. Repeated paragraphs are left out."""
    seen: set[str] = set()
    for file in sorted(folder.rglob("*")):
        name = file.name.removesuffix(".gz")
        source = "_sources" in file.parts  # the source of a page
        if source or not file.is_file() or file.is_symlink() or not name.endswith((".html", ".txt", ".pod")):
            continue
        raw = gzip.decompress(file.read_bytes()) if file.suffix == ".gz" else file.read_bytes()
        found = [p for p in paragraphs(raw.decode("utf-8", "ignore"), name.endswith(".html")) if p not in seen]
        seen.update(found)
        if found:
            yield found


def unpack(package: str, folder: Path) -> None:
    """Unpacks a package. Raises InputFileError if apt does not have it."""
    for command in (["apt-get", "download", package], ["sh", "-c", "dpkg-deb -x *.deb unpacked"]):
        try:
            subprocess.run(command, cwd=folder, check=True, capture_output=True, text=True)
        except (OSError, subprocess.CalledProcessError) as error:
            reason = (getattr(error, "stderr", "") or str(error)).strip().splitlines()[-1:]
            raise InputFileError(f"package {package}: {' '.join(reason)}") from None


def corpus(packages: Iterable[str]) -> Iterator[str]:
    """Yields documents, with a blank line after each."""
    for package in packages:
        with tempfile.TemporaryDirectory() as folder:
            unpack(package, Path(folder))
            size = 0
            for document in documents(Path(folder) / "unpacked"):
                text = "\n".join(document) + "\n\n"
                size += len(text)
                yield text
        print(f"{package} ({PACKAGES.get(package, 'licence: see the package')}): {size / 1e6:.1f} MB", file=sys.stderr)


@refusing
def main(argv: list[str] | None = None) -> int:
    parser = Parser(__doc__)
    parser.add_argument("--out", type=Path, required=True, metavar="FILE", help="file of the new corpus")
    parser.add_argument(
        "--packages", nargs="+", default=list(PACKAGES), metavar="NAME", help="Debian packages, in the order of reading"
    )
    args = parser.parse_args(argv)
    text = "".join(corpus(args.packages))
    try:
        args.out.write_text(text, encoding="utf-8")
    except OSError as error:
        raise OutputError(f"{args.out}: cannot be written: {error.strerror}") from None
    return 0


if __name__ == "__main__":
    sys.exit(main())
