"""One rank of ``routepack train``, as the launcher or torchrun starts it."""

import sys

from routepack.torchtitan.launch.launch import main

main(sys.argv[1:])
