#!/usr/bin/env bash
# evidence.ray.run on nodes in network namespaces of their own; needs root, and a mount namespace to hide folders in.
set -euo pipefail
# Ray guards a cluster that ray start makes with a token as soon as a user has one: so this one has its own, either way.
RAY_AUTH_TOKEN=$(python -c 'import secrets; print(secrets.token_hex(32))')
export RAY_AUTH_MODE=token RAY_AUTH_TOKEN
trap 'ip netns del hk0' EXIT
ip netns add hk0
ip netns exec hk0 python -m evidence.ray.run "$@" --machines namespaces
