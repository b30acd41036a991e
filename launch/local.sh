#!/bin/sh
# Train on all GPUs of this machine (on two CPU ranks if it has none):
#
#     launch/local.sh                                    # the configuration below
#     launch/local.sh --optim.lr 3e-4                    # change one setting
#     CONFIG=my/run.yaml launch/local.sh                 # your own configuration
#     PET_NPROC_PER_NODE=4 launch/local.sh               # four ranks
#
# Change for your own job: CONFIG; PYTHON, to use another environment.
set -eu

repository=$(CDPATH='' cd -- "$(dirname -- "$0")/.." && pwd)
CONFIG=${CONFIG:-$repository/configs/quickstart.yaml}
PYTHON=${PYTHON:-python3}

# Also works from a source tree that is not installed.
export PYTHONPATH="$repository${PYTHONPATH:+:$PYTHONPATH}"
exec "$PYTHON" -m distmp launch -- --config "$CONFIG" "$@"
