"""schemathesis: requests made from the OpenAPI, none of which may fail the server."""

import pytest
import requests
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from hypothesis.errors import Unsatisfiable

from setstream.serve.bodies import ARROW, NPY
from setstream.serve.events import NDJSON
from tests.serve.conftest import listening

schemathesis.openapi.media_type(NPY, st.binary())
schemathesis.openapi.media_type(ARROW, st.binary())
schemathesis.openapi.media_type("application/octet-stream", st.binary())
schemathesis.openapi.media_type(NDJSON, st.binary())


def ask_all(place, examples):
    """So many generated requests of each operation; gives how many were sent, by status."""
    seen = {}
    with listening(place, max_sets=10_000) as (_, port), requests.Session() as session:
        url = f"http://127.0.0.1:{port}"
        schema = schemathesis.openapi.from_url(f"{url}/openapi.json")
        for found in schema.get_all_operations():
            operation = found.ok()
            for mode in (schemathesis.GenerationMode.POSITIVE, schemathesis.GenerationMode.NEGATIVE):
                try:
                    strategy = operation.as_strategy(generation_mode=mode)

                    @settings(
                        max_examples=examples,
                        deadline=None,
                        database=None,
                        phases=[Phase.generate],
                        suppress_health_check=list(HealthCheck),
                        derandomize=True,
                    )
                    @given(case=strategy)
                    def ask(case):
                        answer = case.call(base_url=url, session=session)
                        seen[answer.status_code] = seen.get(answer.status_code, 0) + 1
                        assert answer.status_code < 500, (case.as_curl_command(), answer.text)
                        case.validate_response(answer, checks=[schemathesis.checks.not_a_server_error])

                    ask()
                except (
                    Unsatisfiable,
                    schemathesis.errors.SchemathesisError,
                ) as error:  # nothing to negate in an operation without inputs
                    print(operation.label, mode, str(error)[:60])
            print(operation.label, sum(seen.values()), flush=True)
    return seen


@pytest.mark.parametrize("examples", [12, pytest.param(600, marks=pytest.mark.slow)])
def test_no_generated_request_fails_the_server(tmp_path, examples):
    seen = ask_all(tmp_path / "s.db", examples)
    print(f"{sum(seen.values())} requests: {dict(sorted(seen.items()))}")
    assert sum(seen.values()) > 10 * examples
    assert seen[200] > 0
