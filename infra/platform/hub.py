"""Errors of the Hugging Face hub as sentences with the fix.

The hub's library reads the environment: HF_TOKEN, HF_ENDPOINT, HF_HUB_OFFLINE, proxies.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import httpx2
from huggingface_hub import constants, errors

from ostinato.infra.platform.errors import ConfigError
from ostinato.infra.platform.hub_names import HubRepository

ANSWER_SECONDS = 30  # for an answer without files
UNREACHED = (httpx2.TransportError, errors.OfflineModeIsEnabled)


@contextmanager
def explaining(repository: HubRepository, kind: str, page: str, wanted: str) -> Iterator[None]:
    """Within the block an error of the hub becomes a ConfigError. `kind`: model or data set; `page`: path of its page
    on the hub; `wanted`: what else the name could have been, such as a directory.
    """
    hub, text = constants.ENDPOINT, ""
    url = f"{hub}/{page}"
    try:
        yield
    except errors.GatedRepoError:
        text = f"is gated: accept its conditions at {url}, then set HF_TOKEN to a token of that account"
    except errors.RepositoryNotFoundError:
        text = (
            f"is no {wanted} here and no public {kind} of {hub}; correct the name, or set HF_TOKEN"
        )
    except errors.RevisionNotFoundError:
        text = f"is no branch, tag or commit of the {kind}, see {url}/commits/main"
    except errors.HfHubHTTPError as error:
        text = f"cannot be fetched: {error.server_message or error}; see {url}, then run again"
    except (*UNREACHED, errors.LocalEntryNotFoundError) as error:
        text = (
            f"is no {wanted} here, and {hub} is not reached ({str(error).splitlines()[0]}); run "
            "again with a network, completed files are kept"
        )
    if text:
        raise ConfigError(f"{repository} {text}")
