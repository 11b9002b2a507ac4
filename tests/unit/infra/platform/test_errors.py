"""Errors: one family, safe to pickle, assigned at boundaries."""

import pickle

import pytest

from ostinato.infra.platform.errors import (
    ERROR_TYPES,
    ClusterError,
    ConfigError,
    OstinatoError,
    SandboxError,
    SandboxLost,
    TrainingError,
    boundary,
    is_retryable,
    type_name,
)


@pytest.mark.parametrize("error_type", ERROR_TYPES.values())
def test_every_error_survives_pickling(error_type: type[OstinatoError]) -> None:
    copy = pickle.loads(pickle.dumps(error_type("sandbox s-1: seen 2, wanted 1")))

    assert type(copy) is error_type
    assert str(copy) == "sandbox s-1: seen 2, wanted 1"


def test_boundary_names_the_type_of_a_stray_and_keeps_its_cause() -> None:
    expected = pytest.raises(TrainingError, match="step 4: KeyError: 'loss'")
    with expected as caught, boundary(TrainingError, "step 4"):
        {}["loss"]

    assert isinstance(caught.value.__cause__, KeyError)


def test_boundary_lets_typed_errors_and_interrupts_pass() -> None:
    with pytest.raises(SandboxLost), boundary(TrainingError, "step"):
        raise SandboxLost("gone")
    with pytest.raises(KeyboardInterrupt), boundary(TrainingError, "step"):
        raise KeyboardInterrupt


def test_only_named_transient_errors_are_retried() -> None:
    assert is_retryable(ClusterError("node lost"))
    assert is_retryable(SandboxLost("gone"))
    assert not is_retryable(SandboxError("refused"))
    assert not is_retryable(ConfigError("wrong"))
    assert not is_retryable(ValueError("a bug"))


def test_type_name_looks_through_foreign_wrappers() -> None:
    class Wrapped(SandboxLost):
        pass

    assert type_name(Wrapped("gone")) == "SandboxLost"
