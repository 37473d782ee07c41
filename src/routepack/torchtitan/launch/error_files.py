"""A rank's error on its way to the launcher: in a file, as torch's elastic launchers exchange them."""

from __future__ import annotations

import json
import os
import time
import traceback

from torch.distributed.elastic.multiprocessing.errors import ErrorHandler, ProcessFailure

from routepack.core.errors import RoutePackError


class ErrorFiles(ErrorHandler):
    """Writes what ended a rank into the file that the launcher named: RoutePack's own or torchrun, which shows it as well."""

    def record_exception(self, e: BaseException) -> None:
        """Write the error's kind and message, and whether this rank only heard of another one's error."""
        if not (path := os.environ.get("TORCHELASTIC_ERROR_FILE")):
            return
        said, second_hand = traceback.format_exc(), None
        if isinstance(e, RoutePackError):
            said, second_hand = f"routepack: {e}", e.second_hand
        # What torch reads is message.message and extraInfo; of py_callstack, torchrun shows what stands there.
        shown = {"py_callstack": said, "timestamp": str(int(time.time()))}
        error = {"message": str(e), "kind": type(e).__name__, "second_hand": second_hand, "extraInfo": shown}
        with open(path, "w") as file:
            json.dump({"message": error}, file)


def message_of(failure: ProcessFailure) -> str:
    """What a rank's RoutePackError says; empty where it was killed, or had an error of another kind."""
    error = failure.error_file_data["message"]
    return error["message"] if isinstance(error, dict) and error.get("second_hand") is not None else ""


def is_second_hand(failure: ProcessFailure) -> bool:
    """Whether all that a rank's RoutePackError says is that another one has an error, or is gone."""
    return bool(message_of(failure)) and failure.error_file_data["message"]["second_hand"]
