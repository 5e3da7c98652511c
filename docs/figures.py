"""Every measured figure of README and docs, taken from a file under `results/`.

A figure in a page is marked, `<!--= suite ddpnopt ahead -->9<!--/-->`: the words say where it comes from. `cell` reads
any table, `<!--= cell baselines/damping.csv / 30 & 12 / accuracy -->`, and `constant` the source of the package. After
new measurements

    python docs/figures.py

writes the new figures into the pages; a test fails where a page and the results differ.
"""

from __future__ import annotations

import ast
import csv
import re
import sys
from collections.abc import Iterator
from functools import cache, partial
from pathlib import Path
from statistics import fmean, median

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "results"
PAGES = (ROOT / "README.md", ROOT / "submissions" / "README.md", *sorted((ROOT / "docs").rglob("*.md")))
MARK = re.compile(r"<!--= (?P<name>[^>]*?) -->(?P<shown>.*?)<!--/-->", re.S)
BASELINES = ("SGD-m", "RMSprop", "Adam", "EKFAC")
OTHERS = {
    "sgd-m": "SGD-m", "rmsprop": "RMSprop", "adam": "Adam", "ekfac": "EKFAC", "soap": "SOAP", "muon": "Muon",
    "schedule-free": "schedule-free AdamW", "prodigy": "Prodigy",
}  # fmt: skip
"""The methods of the learning-rate windows that DDPNOpt is compared with."""
NUMBER = re.compile(r"[-+]?\d+(?:\.\d+)?(?:e[-+]?\d+)?")
NUMBERS = ("no", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")


@cache
def rows(path: str) -> list[dict[str, str]]:
    with (RESULTS / path).open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def figure(name: str) -> str:
    """The text that belongs at a mark."""
    kind, _, rest = name.partition(" ")
    known = {
        "cell": cell,
        "range": cells,
        "ratio": ratio,
        "constant": constant,
        "readings": readings,
        "tasks": tasks,
        "suite": suite,
        "sealed": partial(suite, path="suite/sealed.csv"),
        "sealed-again": partial(suite, path="suite/sealed-again.csv"),
        "fifth-set": partial(suite, path="suite/fifth-set.csv"),
        "open-again": partial(suite, path="suite/open-again.csv"),
        "first-set": partial(suite, path="suite/first-set.csv"),
        "second-set": partial(suite, path="suite/second-set.csv"),
        "second-set-again": partial(suite, path="suite/second-set-again.csv"),
        "first-look": partial(suite, path="suite/first-look.csv"),
        "first-steps": first_steps,
        "trouble": trouble,
        "gallery": gallery,
        "table3-gap": table3_gap,
        "accuracy": accuracy,
        "grid": grid,
        "speed": speed,
        "speed-noise": speed_noise,
        "window": window,
        "windows": windows_of_others,
        "pinn": pinn,
    }
    if kind not in known:
        raise KeyError(f"no figure {name!r}; kinds: {', '.join(known)}")
    return known[kind](*rest.split(" / "))


@cache
def tables(path: str) -> list[tuple[list[str], list[list[str]]]]:
    """The tables of a CSV or Markdown file, headings and rows; `file.md#heading` are those below a heading."""
    file, _, heading = path.partition("#")
    text = (RESULTS / file).read_text(encoding="utf-8")
    if file.endswith(".csv"):
        head, *lines = csv.reader(text.splitlines())
        return [(head, lines)]
    if heading:
        text = re.split(r"^#+ ", text.split(f"# {heading}\n", 1)[1], maxsplit=1, flags=re.M)[0]
    found = []
    for block in re.findall(r"(?:^\|.*\|\n?)+", text, flags=re.M):
        cut = [[part.strip(" *") for part in line.strip()[1:-1].split("|")] for line in block.splitlines()]
        found.append((cut[0], cut[2:]))
    return found


def cell(path: str, row: str, column: str, form: str = "") -> str:
    """`cell table3/control.csv / DIGITS / E-MSA / mean 1`: a row by its first columns, joined by ` & `, and a column.

    The last part rounds to so many decimals and takes the number before the ±, `mean`; all before a bracket, `plain`;
    or the number in the bracket, `bracket`, which is the paper's in most tables. `percent` is a hundred times as much.
    """
    keys = row.split(" & ")
    found = [
        line[head.index(column)]
        for head, lines in tables(path)
        if column in head
        for line in lines
        if line[: len(keys)] == keys
    ]
    if len(found) != 1:
        raise KeyError(f"{len(found)} cells {row!r}, {column!r} in {path}")
    return shown(found[0], form)


def shown(text: str, form: str) -> str:
    """A cell, or the part of it that is asked for, rounded."""
    *parts, digits = form.split() if form[-1:].isdigit() else [*form.split(), ""]
    if "bracket" in parts:
        text = text.partition("(")[2].partition(")")[0]
    if "plain" in parts or "mean" in parts:
        text = text.partition(" (")[0]
    if "mean" in parts:
        text = text.partition(" ±")[0]
    if not digits:
        return text
    scale = 100 if "percent" in parts else 1
    return NUMBER.sub(lambda number: f"{scale * float(number[0]):.{int(digits)}f}", text)


def cells(path: str, names: str, column: str, form: str = "") -> str:
    """`range speed/speed.csv / cnn & 128 & singd | cnn & 128 & sam / time_ratio / 2`: from the least to the largest."""
    found = sorted((cell(path, row, column, form) for row in names.split(" | ")), key=float)
    return f"{found[0]} to {found[-1]}" if found[0] != found[-1] else found[0]


def ratio(path: str, row: str, other: str, column: str, digits: str) -> str:
    """`ratio speed/speed.csv / cnn & 128 & soap / cnn & 128 & sgd / milliseconds / 2`: a row over another one."""
    return f"{float(cell(path, row, column)) / float(cell(path, other, column)):.{int(digits)}f}"


def constant(name: str, form: str = "") -> str:
    """`constant step_length.REACH`: a number of the source; `percent` is a hundred times as much."""
    module, _, variable = name.rpartition(".")
    found = [
        value
        for path in (ROOT / "src").rglob(f"{module}.py")
        for node in ast.parse(path.read_text(encoding="utf-8")).body
        if isinstance(node, ast.Assign)
        for target, value in _assigned(node.targets[0], node.value)
        if target == variable
    ]
    if len(found) != 1:
        raise KeyError(f"{len(found)} constants {name!r}")
    value = eval(compile(ast.Expression(found[0]), name, "eval"), {"__builtins__": {}})
    values = value if isinstance(value, tuple) else (value,)
    return ", ".join(_number(100 * each if form == "percent" else each) for each in values)


def _assigned(target: ast.expr, value: ast.expr) -> list[tuple[str, ast.expr]]:
    if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
        return [(ast.unparse(name), each) for name, each in zip(target.elts, value.elts, strict=True)]
    return [(ast.unparse(target), value)]


def _number(value: float) -> str:
    if value >= 2**15 and value.bit_count() == 1:
        return f"2^{value.bit_length() - 1}"
    return re.sub(r"e-0?", "e-", f"{value:g}")


def readings(what: str, reading: str) -> str:
    """`readings distance / H/B^2, guard`: the mean over the curvatures; `readings fig-grid / …`: how many claims hold,
    do not hold, and are open."""
    if what == "distance":
        found = [float(row["distance"]) for row in rows("fig-grid/readings.csv") if row["V_xx"] == reading]
        return f"{fmean(found):.2f}"
    mine = [row for row in rows(f"{what}/readings.csv") if row["V_xx"] == reading]
    verdicts = [part for row in mine for value in row.values() if value for part in value.split(", ")]
    return ", ".join(str(verdicts.count(verdict)) for verdict in ("holds", "does not hold", "open"))


def tasks(which: str) -> str:
    """`tasks all`: how many the suite defines."""
    assert which == "all"
    defined = [
        node.name
        for path in (ROOT / "src" / "ddpnopt" / "lab" / "suite").glob("*.py")
        for node in ast.parse(path.read_text(encoding="utf-8")).body
        if isinstance(node, ast.FunctionDef)
        and any(isinstance(by, ast.Call) and ast.unparse(by.func) == "suite_task" for by in node.decorator_list)
    ]
    return str(len(defined))


def suite(method: str, what: str = "", *, path: str = "suite/suite.csv") -> str:
    """`suite ddpnopt ahead`: on how many tasks; also not behind, tasks, seeds, reached, time, best, rank, names ahead.

    `repeated` is the largest share of a run's steps that were made again, in percent, and `undone` how many were given
    up in all; `most repeated` and `names undone` are the tasks.

    `sealed ddpnopt ahead` is about the fourth set, `first-look ddpnopt ahead` about the third when it was still sealed.
    """
    if not what:
        method, _, what = method.partition(" ")
    mine = [row for row in rows(path) if row["method"] == method]
    ratios = [float(row["time_ratio"]) for row in mine if row["time_ratio"] not in ("", "inf", "nan")]
    counts = {
        verdict: sum(row["verdict"] == verdict for row in mine) for verdict in ("ahead", "level", "behind", "collapsed")
    }
    found: dict[str, object] = {
        **counts,
        "tasks": len(mine),
        "not behind": counts["ahead"] + counts["level"],
        "seeds": NUMBERS[int(mine[0]["seeds"])],
        "reached": len(ratios),
        "time": f"{median(ratios):.1f}" if ratios else "–",
        "best": sum(float(row["rank"]) == 1 for row in mine),
        "rank": f"{fmean(float(row['rank']) for row in mine):.2f}",
        **{f"names {verdict}": _names(mine, verdict) for verdict in counts},
    }
    return _repetitions(mine, what) if what not in found else str(found[what])


def _repetitions(mine: list[dict[str, str]], what: str) -> str:
    """Of tables that count them: older ones do not."""
    known = [row for row in mine if row.get("repeated", "") not in ("", "nan")]
    most = max(known, key=lambda row: float(row["repeated"]))
    given_up = [row for row in known if float(row["undone"])]
    found = {
        "repeated": f"{100 * float(most['repeated']):.1f}",
        "most repeated": f"`{most['task']}`",
        "undone": str(sum(int(float(row["undone"])) for row in given_up)),
        "names undone": ", ".join(f"`{row['task']}`" for row in given_up) or "none",
    }
    return found[what]


def _names(mine: list[dict[str, str]], verdict: str) -> str:
    """The tasks with a verdict, as code."""
    return ", ".join(f"`{row['task']}`" for row in mine if row["verdict"] == verdict) or "none"


def accuracy(data_set: str, column: str) -> str:
    """`accuracy DIGITS / best`: the best tuned baseline with its name, or the column of that name."""
    [row] = [row for row in rows("ours/accuracy.csv") if row["data set"] == data_set]
    if column == "best":
        best = max(BASELINES, key=lambda name: float(row[name].split()[0]))
        return f"{best} {_spread(row[best])}"
    return _spread(row[column])


def table3_gap(data_set: str) -> str:
    """`table3-gap WINE`: how far the baselines' accuracies are from the paper's, at most, in points."""
    texts = [cell("table3/accuracy.csv", data_set, name) for name in BASELINES]
    return f"{max(abs(float(shown(text, 'mean')) - float(shown(text, 'bracket'))) for text in texts):.1f}"


def grid(rate: str, column: str) -> str:
    """`grid 0.4 / SGD`: the mean training loss of the paper's grid on DIGITS, without the paper's own figure."""
    [row] = [row for row in rows("fig-grid/loss-sgd.csv") if row["learning rate"] == rate]
    return row[column].split(" (")[0]


def speed(file: str, network: str, method: str, column: str, digits: str = "1") -> str:
    """`speed speed / cnn / ddpnopt / time_ratio`, or with the number of decimals, `/ 2`."""
    [row] = [r for r in rows(f"speed/{file}.csv") if (r["network"], r["method"]) == (network, method)]
    return f"{float(row[column]):.{int(digits)}f}"


def speed_noise(file: str) -> str:
    """`speed-noise speed-again`: from what to what SGD compared with itself ranges, 1 without noise."""
    found = [float(row["time_ratio"]) for row in rows(f"speed/{file}.csv") if row["method"] == "sgd-again"]
    return f"{min(found):.2f} to {max(found):.2f}"


def first_steps(task: str, method: str, step: str, column: str = "train") -> str:
    """`first-steps digits / Adam 0.01 / 20`: the training loss after so many steps, or `/ validation`."""
    [row] = [
        r for r in rows("first-steps/first-steps.csv") if (r["task"], r["method"], r["step"]) == (task, method, step)
    ]
    return row[column]


def trouble(symptom: str) -> str:
    """`trouble Small steps`: what `ddpnopt view` says about the run of that picture."""
    [row] = [r for r in rows("trouble/trouble.csv") if r["symptom"] == symptom]
    return row["said"]


def gallery(example: str) -> str:
    """`gallery unet`: what the example prints at the end."""
    [row] = [r for r in rows("gallery/gallery.csv") if r["example"] == example]
    return row["printed"]


def window(task: str, method: str, column: str) -> str:
    """`window digits / soap / best`: the accuracy at its best rate; also default, own window, a number by its column.

    `baseline` stands for the method other than DDPNOpt that is best at its best rate; `window digits / ddpnopt / lead`
    is that of a method's default over it, `window digits / soap / over default` that of a method over DDPNOpt.
    """
    mine = [row for row in rows("lr-window/lr-window.csv") if row["task"] == task]
    top = max((r for r in mine if r["method"] in OTHERS), key=lambda r: float(r["best_accuracy"]))
    row = top if method == "baseline" else next(r for r in mine if r["method"] == method)
    if column in ("best", "default"):
        shown = f"{float(row[f'{column}_accuracy']):.1f} ± {float(row[f'{column}_std']):.1f}"
        return f"{shown} ({OTHERS[row['method']]})" if method == "baseline" else shown
    if column == "own window":
        return f"{'≥ ' if row['own_window_open_ended'] == 'True' else ''}{float(row['own_window_decades']):.1f}"
    if column == "over default":
        [ours] = [r for r in mine if r["method"] == "ddpnopt"]
        return f"{float(row['best_accuracy']) - float(ours['default_accuracy']):.1f}"
    if column == "lead":
        return f"{float(row['default_accuracy']) - float(top['best_accuracy']):+.1f}".replace("-", "−")
    return f"{float(row[column]):.1f}"


def windows_of_others(task: str) -> str:
    """`windows digits`: from the narrowest to the widest own window of the other methods."""
    found = [float(r["own_window_decades"]) for r in rows("lr-window/lr-window.csv")
             if r["task"] == task and r["method"] in OTHERS]  # fmt: skip
    return f"{min(found):.1f} to {max(found):.1f}"


def pinn(points: str, problem: str, method: str) -> str:
    """`pinn fixed / poisson / Adam`: the relative error at the end.

    With `time` for the method, the time of a step of DDPNOpt as a multiple of Adam's.
    """
    if method == "time":
        steps = {r["method"].split()[0]: int(r["steps"]) for r in rows(f"pinn/{points}.csv") if r["problem"] == problem}
        return f"{steps['Adam'] / steps['DDPNOpt']:.1f}"
    [row] = [r for r in rows(f"pinn/{points}.csv") if (r["problem"], r["method"].split()[0]) == (problem, method)]
    return f"{float(row['error']):.1e}"


def _spread(text: str) -> str:
    """Accuracies to a tenth."""
    return " ± ".join(f"{float(part):.1f}" for part in text.split(" (")[0].split(" ± "))


def marks(page: Path) -> Iterator[tuple[str, str, str]]:
    """The marks of a page: name, what is shown, what belongs there."""
    for mark in MARK.finditer(page.read_text(encoding="utf-8")):
        yield mark["name"], mark["shown"], figure(mark["name"])


def lost(page: Path) -> list[str]:
    """The marks of a page whose figure the results do not have, or no longer."""
    found = []
    for mark in MARK.finditer(page.read_text(encoding="utf-8")):
        try:
            figure(mark["name"])
        except (KeyError, ValueError, StopIteration, OSError) as error:
            found.append(f"{mark['name']}: {error!r}")
    return found


def renew(page: Path) -> bool:
    """Write the figures of today into a page; whether it has changed."""
    before = page.read_text(encoding="utf-8")
    after = MARK.sub(lambda mark: f"<!--= {mark['name']} -->{figure(mark['name'])}<!--/-->", before)
    if after != before:
        page.write_text(after, encoding="utf-8")
    return after != before


def main() -> int:
    """All pages, but for those with a mark that leads nowhere, which are named."""
    changed, wrong = [], {}
    for page in PAGES:
        name = str(page.relative_to(ROOT))
        if missing := lost(page):
            wrong[name] = missing
        elif renew(page):
            changed.append(name)
    print(*changed or ([] if wrong else ["all figures are those of results/"]), sep="\n")
    for name, missing in wrong.items():
        print(f"{name} is left as it is:", *missing, sep="\n  ", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
