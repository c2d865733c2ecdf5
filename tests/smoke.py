"""What must work in an environment that holds the wheel and nothing else: `python tests/smoke.py` (run by `make dist`).

With --cli, the extra `cli` is there, too, and the command line is tried. Only the core's dependencies may be imported here.
"""

import importlib.util
import subprocess
import sys
import tempfile
from pathlib import Path


def check_command_line(installed):
    """`setstream` prints its help with its extra, and names the extra without it."""
    command = Path(sys.executable).with_name("setstream")
    done = subprocess.run([command, "--help"], capture_output=True, text=True, check=False)
    if installed:
        assert done.returncode == 0, done.stderr
        assert "train" in done.stdout
        assert "umbc+set-transformer" in subprocess.run([command, "models"], capture_output=True, text=True, check=True).stdout
    else:
        assert "pip install 'setstream[cli]'" in done.stderr, done.stderr


def check_library():
    """Encode, train, stream, save and load."""
    import torch

    import setstream as ss

    assert Path(ss.__file__).is_relative_to(sys.prefix), f"{ss.__file__} is not the installed package"
    model = ss.SetModel(ss.SetEncoder(torch.nn.Linear(3, 16), ss.UMBC(16, num_slots=4)), torch.nn.Flatten())
    sets = torch.randn(2, 100, 3)
    with torch.no_grad():
        whole = model(sets)
    ss.encode(model.encoder, sets, chunk_size=10, gradient="exact").sum().backward()
    assert all(torch.isfinite(weight.grad).all() for weight in model.encoder.phi.parameters())
    model.eval()
    stream = model.stream()
    for chunk in sets.split(30, dim=1):
        stream.update(chunk)
    torch.testing.assert_close(stream.predict(), whole, rtol=1e-4, atol=1e-5)
    with tempfile.TemporaryDirectory() as folder:
        stream.state.save(Path(folder) / "state.safetensors")
        state = ss.State.load(Path(folder) / "state.safetensors")
        torch.testing.assert_close(model.head(model.encoder.finalize(state)), whole, rtol=1e-4, atol=1e-5)
        with ss.StateStore(Path(folder) / "states.db", model) as store:
            store.update("a", sets[0])
            torch.testing.assert_close(store.predict("a")[0], whole[0], rtol=1e-4, atol=1e-5)
    from setstream.tasks.loading import open_model

    assert open_model("umbc+set-transformer").stream() is not None  # weights that the wheel carries
    print(f"setstream {ss.__version__} with torch {torch.__version__} on Python {sys.version.split()[0]}: all well")


if __name__ == "__main__":
    typer = importlib.util.find_spec("typer") is not None
    assert typer == ("--cli" in sys.argv), "the environment should hold the extra `cli` with --cli, and only then"
    check_command_line(typer)
    check_library()
