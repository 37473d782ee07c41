"""One rank of a launch: runs the checks it is given and leaves what they give in a file.

    python worker.py FOLDER RANK WORLD_SIZE

FOLDER/checks.pickle holds [(key, check, arguments)]; FOLDER/rank<RANK>.pickle gets {key: result}.
"""

from __future__ import annotations

import os
import pickle
import sys
import traceback
from datetime import timedelta
from pathlib import Path
from typing import Any


def main(folder: Path, rank: int, world_size: int) -> None:
    import checks_guard  # noqa: F401 - registers its checks
    import checks_nodes  # noqa: F401
    import checks_step  # noqa: F401
    import torch.distributed as dist
    from checks import CHECKS

    from routepack.distributed.collectives import leave

    # A file joins the ranks: unlike a port it cannot be taken by somebody else between choosing and using it.
    join = f"file://{folder}/join"
    dist.init_process_group("gloo", init_method=join, rank=rank, world_size=world_size, timeout=timedelta(seconds=120))
    results: dict[str, Any] = {}
    try:
        for key, name, arguments in pickle.loads((folder / "checks.pickle").read_bytes()):
            results[key] = CHECKS[name](**arguments)
    except BaseException:
        results["error"] = traceback.format_exc()
        raise
    finally:
        (folder / f"rank{rank}.part").write_bytes(pickle.dumps(results))
        (folder / f"rank{rank}.part").rename(folder / f"rank{rank}.pickle")
    leave()


if __name__ == "__main__":
    os.environ["LOCAL_RANK"] = sys.argv[2]
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
