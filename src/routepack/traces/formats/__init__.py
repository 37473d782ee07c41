"""Recorded routing of each stack to a RolloutBatch and back; none of the stacks is imported.

Every stack has a module here with two functions: ``load(source, model, **options) -> Imported`` takes records, arrays or
dicts as that stack has them, ``export(batch, ...)`` gives them back. :data:`STACKS` names them, :func:`convert` reads
files. What was not really recorded is said by ``RolloutBatch.valid_T``, never by an id.
"""

from routepack.traces.formats.convention import Convention
from routepack.traces.formats.conversion import STACKS, convert, load, read, stack_module
from routepack.traces.formats.import_options import Imported, ImportOptions, ImportReport
from routepack.traces.formats.model_routing import ModelRouting

__all__ = [
    "STACKS",
    "Convention",
    "ImportOptions",
    "ImportReport",
    "Imported",
    "ModelRouting",
    "convert",
    "load",
    "read",
    "stack_module",
]
