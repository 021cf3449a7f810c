"""Models of Hugging Face's hub: the present version if the hub answers, else the copy that was fetched before."""

from functools import cache

from csattn.errors import ModelError

_ANSWER_S = 5.0


@cache  # its config may be read before it is loaded
def hub_source(hub_id: str) -> str:
    """Return the id if the hub answers, else the directory of the copy that was fetched before.

    A process asks the hub once, with a short timeout: `transformers` would try for half a minute, again for each file.
    Raises ModelError if the hub does not answer and there is no copy.
    """
    from huggingface_hub import HfApi, snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        HfApi().model_info(hub_id, timeout=_ANSWER_S)
    except (HfHubHTTPError, HFValidationError):  # fetching it will report what is wrong with the id
        return hub_id
    except Exception as error:  # the HTTP client's, which differs between versions
        try:
            return str(snapshot_download(hub_id, local_files_only=True))
        except LocalEntryNotFoundError:
            raise ModelError(
                f"{hub_id} could not be loaded: it has not been downloaded before, and the hub cannot be reached "
                f"({first_line(error)}); connect this machine to the network, or download the model elsewhere and "
                "give its directory"
            ) from error
    return hub_id


def fetched(hub_id: str) -> str:
    """Download weights and settings of a model, unless they are here, and return their directory."""
    from huggingface_hub import snapshot_download

    folder: str = snapshot_download(hub_id, allow_patterns=["*.safetensors", "*.json"], ignore_patterns="consolidated*")
    return folder


def first_line(error: Exception) -> str:
    """Return the first line of an error's message; if that ends with a colon, the second one as well."""
    lines = [line.rstrip() for line in str(error).strip().splitlines()] or [type(error).__name__]
    return " ".join(line.strip() for line in lines[: 2 if lines[0].endswith(":") else 1])
