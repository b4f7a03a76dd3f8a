"""Write the numbers that the pages quote from benchmarks/results anew, after a benchmark was run again.

    python tools/quote.py          # which numbers have changed
    python tools/quote.py --write

The marks and what they mean: tests/architecture/test_quoted_numbers.py. Sentences around a number stay as they are:
read them.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))
from tests.architecture.test_quoted_numbers import MARK, MARKED, logged, wrong


def renew(mark: re.Match[str]) -> str:
    """The mark with the log's number, written with as many decimals and the same signs as before."""
    number, thousands, how, file, path = mark.groups()
    if not wrong(mark[0]):
        return mark[0]
    _, _, decimals = number.partition(".")
    value = logged(how or "", file, path) / (1000 if thousands else 1)
    comma = "," if "," in number or abs(value) >= 1000 else ""
    plus = "+" if number[0] == "+" else ""
    return f"{value:{plus}{comma}.{len(decimals)}f}".replace("-", "−") + mark[0][len(number) :]


def main() -> None:
    for page in MARKED:
        text = page.read_text()
        for line in wrong(text):
            print(f"{page.name}: {line}")
        if "--write" in sys.argv[1:]:
            page.write_text(MARK.sub(renew, text))


if __name__ == "__main__":
    main()
