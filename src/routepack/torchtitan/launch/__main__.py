"""``python -m routepack.torchtitan.launch``: one rank of ``routepack train``, as its launcher or torchrun starts it."""

import sys

from routepack.torchtitan.launch.launch import main

main(sys.argv[1:])
