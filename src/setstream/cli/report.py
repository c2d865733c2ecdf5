"""`setstream report`: finished runs as one page; `setstream demo`: one set, in four orders, through five trained models."""

from pathlib import Path

import torch

from setstream.cli.command import console, print_table
from setstream.report import write_report
from setstream.report.page import Page
from setstream.tasks.clustering import Clustering, pretrained, sample
from setstream.tasks.clustering.task import SHOWN, STREAMS, add_streams, disagreement, stream_ends


def run_report(folders: list[Path], out: Path, figures: Path | None, trust: list[str] | None) -> None:
    """Write a page about finished runs."""
    with console.status("drawing"):
        runs = write_report(folders, out, figures, trust or [])
    console.print(f"{len(runs)} runs: {out}")


def run_demo(out: Path, seed: int, points: int) -> None:
    """Write figure, animation and report, and print a summary."""
    out.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)  # few points at a time: more threads would be slower
    models = {name: pretrained(name) for name in SHOWN}
    drawn = sample(1, points, generator=torch.Generator().manual_seed(seed))
    title = f"NLL of {points} points, one set, when all have arrived"
    rows = []
    for name, model in models.items():
        ends = stream_ends(model, drawn.points[0], drawn.labels[0])
        nlls = (f"{float(ends[kind].nll(drawn.points)):.3f}" for kind in STREAMS)
        rows.append([name, *nlls, f"{disagreement(ends, drawn.points):.1e}"])
    print_table(("points arrive", *STREAMS.values(), "disagree by"), rows, title)
    console.print(
        f"the oracle, which knows the true mixture: {float(drawn.oracle()):.3f}\n\n"
        "NLL: negative log-likelihood of the points under the clusters that a model predicts; lower is better.\n"
        "Disagree by: how much the four answers differ about a point; 0: the order does not matter.\n"
        "A Set Transformer needs its whole set. Given pieces, its answers are averaged, and the mean depends on the pieces.\n",
    )
    page = Page("One set, four streams")
    with console.status("drawing figure and animation"):
        figure, gif = add_streams(page, models, seed, points)
        figure.savefig(out / "streams.png", dpi=110)
        (out / "streams.gif").write_bytes(gif)
    with console.status("testing the models on 200 sets"):
        task = Clustering(test_sets=200)
        scores = {name: task.evaluate(model) for name, model in models.items()}
    tests = [[name, *(f"{scores[name].get(key, float('nan')):.3f}" for key in ("nll", "oracle", "gap"))] for name in models]
    columns, title = ["model", "NLL", "oracle", "gap"], "200 sets of 1,024 points, in chunks of 8"
    page.section(f"On {title}")
    page.table(columns, tests)
    page.write(out / "report.html")
    print_table(columns, tests, title)
    console.print("gap: how far a model is from the oracle\n")
    for what, file in (("figure", "streams.png"), ("animation", "streams.gif"), ("report", "report.html")):
        console.print(f"{what:10s} {out / file}")
