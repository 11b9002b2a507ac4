"""Ed25519 signatures of certificates by a key of this installation.

A signature proves that the holder of the key wrote exactly these figures. It proves neither that the checks
were run well nor who the holder is: compare the public key with one obtained in another way.
"""

import contextlib
import json
import os
from pathlib import Path

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from pydantic import ValidationError

from ostinato.infra.platform.bounded_files import parse_json, read_bounded
from ostinato.infra.platform.errors import ConfigError
from ostinato.tasks.problems.certification.records import Certificate, SignedCertificate

KEY_FILE = "certificate.key"


def sign(certificate: Certificate, home: Path) -> SignedCertificate:
    """The certificate with this home's signature. The first use creates the key with mode 0600."""
    key = _private_key(home / KEY_FILE)
    return SignedCertificate(
        certificate=certificate,
        public_key=key.public_key().public_bytes_raw().hex(),
        signature=key.sign(_canonical(certificate)).hex(),
    )


def read_signed(path: Path, public_key: str | None = None) -> SignedCertificate:
    """A certificate with a valid signature, else ConfigError. `public_key`: the key that must have signed it."""
    try:
        content = read_bounded(path)
        parse_json(str(path), content)
        signed = SignedCertificate.model_validate_json(content)
        key = Ed25519PublicKey.from_public_bytes(bytes.fromhex(signed.public_key))
        key.verify(bytes.fromhex(signed.signature), _canonical(signed.certificate))
    except InvalidSignature:
        raise ConfigError(
            f"{path}: the signature is not of this content by key {signed.public_key}; wanted an "
            "unchanged certificate"
        ) from None
    except (OSError, ValidationError, ValueError) as error:
        raise ConfigError(f"{path} is no certificate: {error}") from None
    if public_key is not None and signed.public_key != public_key:
        raise ConfigError(f"{path}: signed by key {signed.public_key}, wanted {public_key}")
    return signed


def _canonical(certificate: Certificate) -> bytes:
    content = certificate.model_dump(mode="json")
    return json.dumps(content, sort_keys=True, separators=(",", ":")).encode()


def _private_key(path: Path) -> Ed25519PrivateKey:
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.{os.getpid()}")
    if not path.exists():
        descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(Ed25519PrivateKey.generate().private_bytes_raw())
            file.flush()
            os.fsync(file.fileno())
        with contextlib.suppress(FileExistsError):  # of several processes, the first one wins
            os.link(partial, path)
        partial.unlink()
    content = read_bounded(path)
    if len(content) != 32 or path.stat().st_mode & 0o077:
        mode = path.stat().st_mode & 0o777
        raise ConfigError(
            f"{path} has {len(content)} bytes and mode {mode:o}, wanted 32 and 600: `chmod 600`, or "
            "remove it to sign with a new key"
        )
    return Ed25519PrivateKey.from_private_bytes(content)
