"""probe puts the readers' answers together."""

import socket
from pathlib import Path

from launcher.checks import facts_from_file
from launcher.host.probe import probe


def test_the_probe_answers_on_any_machine_and_its_answer_can_be_given_back(tmp_path: Path) -> None:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        sock.listen(1)
        port = sock.getsockname()[1]
        facts = probe([port], tmp_path / "models", tmp_path / "state")
    assert facts.proc.mem_total_gib
    assert facts.disk.models_free_gib
    assert list(facts.ports) == [str(port)]
    file = tmp_path / "facts.json"
    file.write_text(facts.model_dump_json(), encoding="utf-8")
    assert facts_from_file(file) == (facts, None)
