"""Models of the hub: where it answers, what it has now; else what was fetched from it before."""

from csattn.errors import ModelError

_ANSWER_S = 5.0


def hub_source(hub_id: str) -> str:
    """The id, where the hub answers; else the directory of what was fetched from it before.

    Asked once, and not for long: `transformers` would try for half a minute, for each file anew.
    """
    from huggingface_hub import HfApi, snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        HfApi().model_info(hub_id, timeout=_ANSWER_S)
    except (HfHubHTTPError, HFValidationError):  # what is wrong with the id, is told when it is fetched
        return hub_id
    except Exception as error:  # of the HTTP client, which is another in other versions
        try:
            return str(snapshot_download(hub_id, local_files_only=True))
        except LocalEntryNotFoundError:
            raise ModelError(
                f"{hub_id} could not be loaded: it was not fetched before, and the hub cannot be asked for it "
                f"({first_line(error)}); connect this machine to it, or fetch the model where there is a network and "
                "give its directory"
            ) from error
    return hub_id


def fetched(hub_id: str) -> str:
    """The directory of its weights and settings, on this machine from now on."""
    from huggingface_hub import snapshot_download

    folder: str = snapshot_download(hub_id, allow_patterns=["*.safetensors", "*.json"], ignore_patterns="consolidated*")
    return folder


def first_line(error: Exception) -> str:
    """Of a library's message, and the one that it announces."""
    lines = [line.rstrip() for line in str(error).strip().splitlines()] or [type(error).__name__]
    return " ".join(line.strip() for line in lines[: 2 if lines[0].endswith(":") else 1])
