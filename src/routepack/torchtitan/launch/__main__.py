"""``python -m routepack.torchtitan.launch``: one rank of ``routepack train``, as its launcher or torchrun starts it."""

import sys

from routepack.core.config import split_layers
from routepack.torchtitan.launch.launch import be_rank

be_rank(*split_layers(sys.argv[1:]))
