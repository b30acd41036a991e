#!/bin/sh
# Train on all GPUs of this machine (two CPU ranks where there is none):
#
#     launch/local.sh                                    # the configuration below
#     launch/local.sh --optim.lr 3e-4                    # one setting changed
#     CONFIG=my/run.yaml launch/local.sh                 # a configuration of your own
#     PET_NPROC_PER_NODE=4 launch/local.sh               # four ranks
#
# Change for your own job: CONFIG; PYTHON, to use another environment.
set -eu

repository=$(CDPATH='' cd -- "$(dirname -- "$0")/.." && pwd)
CONFIG=${CONFIG:-$repository/configs/quickstart.yaml}
PYTHON=${PYTHON:-python3}

# Works from a source tree that has not been installed, too.
export PYTHONPATH="$repository${PYTHONPATH:+:$PYTHONPATH}"
exec "$PYTHON" -m distmp launch -- --config "$CONFIG" "$@"
