"""The report of document runs: for each corpus, F1 of every kind of run, and learning curves."""

from setstream.report.page import Page
from setstream.report.runs import Group, add_results, group_by, metric
from setstream.tasks.documents.task import Documents

TUNED = {"": "", "_tuned": ", tuned τ"}
METRICS = {f"{mean} F1{text}": metric(f"{mean}_f1{suffix}") for suffix, text in TUNED.items() for mean in ("micro", "macro")}


def add_report(page: Page, runs: Group) -> None:
    """A section for each corpus."""
    interval = {"micro F1, 95%": lambda group: "{micro_f1_low:.3f} to {micro_f1_high:.3f}".format(**group[0].metrics)}
    for corpus, same_corpus in group_by(runs, lambda run: run.config.task_options.get("corpus", "reuters")).items():
        page.section(f"Documents: {corpus}")
        note = f"{len(same_corpus[0].task_as(Documents).splits['test']):,} test documents. ± over seeds; the interval is the"
        note += " first seed's, over test documents."
        add_results(page, same_corpus, METRICS | interval, note, "micro_f1", highest=True, ylabel="micro F1")
