#!/usr/bin/env bash
# evidence.ray.run on nodes in network namespaces of their own; needs root, and a mount namespace to hide folders in.
set -euo pipefail
trap 'ip netns del hk0' EXIT
ip netns add hk0
ip netns exec hk0 python -m evidence.ray.run "$@" --machines namespaces
