"""Write src/setstream/cli/commands/catalogue.json: `python -m tests.cli.write_catalogue`."""

import json

from setstream._utils.import_path import TASKS
from setstream.cli.commands import CATALOGUE
from setstream.training.task import describe_task


def catalogue_text():
    """What the file should hold."""
    return json.dumps({name: describe_task(name) for name in TASKS}, indent=2, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    CATALOGUE.write_text(catalogue_text())
