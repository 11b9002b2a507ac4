import pytest

from ostinato.infra.platform.errors import SandboxError
from ostinato.infra.sandbox.repository import PreparedRepository, fingerprint_files


def test_save_then_load_gives_the_same_record(tmp_path):
    files = tmp_path / "files"
    (files / "kit").mkdir(parents=True)
    (files / "kit" / "a.py").write_bytes(b"x = 1\n")
    repository = PreparedRepository.from_directory("kit", files, ("kit",), ())
    repository.save()
    assert PreparedRepository.load(tmp_path) == repository


def test_fingerprint_depends_on_names_and_contents_only():
    base = fingerprint_files({"a": b"1", "b": b"2"})
    assert fingerprint_files({"b": b"2", "a": b"1"}) == base
    others = [{"a": b"12", "b": b""}, {"a": b"1", "b": None}, {"a": b"1"}, {"a": b"1", "c": b"2"}]
    assert base not in {fingerprint_files(other) for other in others}
    assert len({fingerprint_files(other) for other in others}) == len(others)


@pytest.mark.parametrize(
    ("path", "editable"),
    [
        ("ledgerkit/money.py", True),
        ("ledgerkit/new_module.py", True),
        ("ledgerkit/tests/test_money.py", False),
        ("ledgerkit/conftest.py", False),
        ("ledgerkit/../ledgerkit/money.py", False),
        ("/repo/ledgerkit/money.py", False),
        ("ledgerkit/hook.pth", False),
        ("setup.cfg", False),
        ("sitecustomize.py", False),
        ("usercustomize.py", False),
        ("pytest.py", False),
    ],
)
def test_only_product_code_is_editable(ledgerkit, path, editable):
    assert ledgerkit.is_editable(path) is editable


def test_keep_editable_drops_what_equals_the_pristine_file(ledgerkit):
    files = {
        **ledgerkit.files,
        "ledgerkit/book.py": b"x\n",
        "ledgerkit/money.py": None,
        "notes.txt": b"",
    }
    assert ledgerkit.keep_editable(files) == {
        "ledgerkit/book.py": b"x\n",
        "ledgerkit/money.py": None,
    }


def test_missing_path_names_the_repository(tmp_path):
    with pytest.raises(SandboxError, match="kit: gone is missing"):
        PreparedRepository.from_directory("kit", tmp_path, ("gone",), ())
