#!/usr/bin/env bash
# What goes wrong while a shard is made: killed, disk full, two at once, input cut short or foreign.
# Wants unshare with a user namespace (or root) for a small tmpfs of its own.
set -euo pipefail
exec 2>&1
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
export XDG_CACHE_HOME=$work/cache
cd "$work"
said() { printf '\n== %s\n' "$*"; }
fails() { set +e; "$@"; echo "exit status $?"; set -e; }

python - <<'P'
from pathlib import Path
from hotkv_trio.llama._tiny_gguf import build_tiny_gguf
build_tiny_gguf(Path("model.gguf"), n_layer=8, n_embd=512, n_vocab=4096)
P
ls -l --block-size=1 model.gguf | awk '{print $NF": "$5" bytes"}'
cat > held.py <<'P'
"""Make a shard in the cache; stop for good when half of it is written."""
import pathlib, sys, time
from hotkv_trio.llama import _gguf, _slice
_gguf.CHUNK = 1 << 16
_slice.file_digest = lambda file, progress: "0" * 64
def held(done, total):
    if done > total // 2:
        pathlib.Path("half").touch()
        time.sleep(600)
_slice.cached_slice("model.gguf", (0, 4), "shards", held)
P
cat > make.py <<'P'
"""Make a shard in the cache, and say how."""
import os, sys
from hotkv_trio.llama import _slice
from hotkv_trio.llama._facts import read_model_facts
_slice.file_digest = lambda file, progress: "0" * 64
write = _slice._write
def told(*arguments):
    sys.stdout.write(f"{sys.argv[1]} writes it\n")
    sys.stdout.flush()
    write(*arguments)
_slice._write = told
path = _slice.cached_slice("model.gguf", (0, 4), "shards")
shard = read_model_facts(path).shard
sys.stdout.write(f"{sys.argv[1]} has layers {shard} in {path.stat().st_size} bytes\n")
P

said "kill -9 when half of the shard is written"
python held.py & pid=$!
until [ -e half ]; do sleep 0.05; done
kill -9 $pid; wait $pid 2>/dev/null || true
echo "shards in the cache: $(find shards -name '*.gguf' -not -name '.*' | wc -l); temporary files: $(find shards -name '*.part' | wc -l)"
python make.py "the next process"
echo "shards in the cache: $(find shards -name '*.gguf' -not -name '.*' | wc -l); temporary files: $(find shards -name '*.part' | wc -l)"
hotkv-trio slice model.gguf --layers 0:4 --out by-hand.gguf >/dev/null 2>&1
cmp by-hand.gguf shards/*.gguf && echo "equal to one made in peace"

said "two processes at once"
rm -rf shards
python make.py A & python make.py B & wait
echo "shards in the cache: $(find shards -name '*.gguf' -not -name '.*' | wc -l)"

said "a disk that is too small (tmpfs of 2 MiB)"
cat > small_disk.sh <<'S'
mount -t tmpfs -o size=2m none disk
hotkv-trio slice model.gguf --layers 0:4 --out disk/shard.gguf
echo "exit status $?; files on it: $(ls -A disk | wc -l)"
S
mkdir disk
unshare -rm bash small_disk.sh

said "a disk that another program fills up meanwhile (tmpfs of 24 MiB)"
cat > filling.py <<'P'
import pathlib
from hotkv_trio.llama import _gguf, _slice
_gguf.CHUNK = 1 << 16
def fill(done, total):
    junk = pathlib.Path("disk/junk")
    if done > total // 4 and not junk.exists():
        try:
            with junk.open("wb", buffering=0) as file:
                while True:
                    file.write(bytes(4096))
        except OSError as error:
            print("the other program:", error)
try:
    _slice.slice_gguf("model.gguf", (0, 4), "disk/shard.gguf", fill)
except Exception as error:
    print(f"{type(error).__name__}: {error}")
print("files on it:", sorted(path.name for path in pathlib.Path("disk").iterdir()))
pathlib.Path("disk/junk").unlink()
path = _slice.slice_gguf("model.gguf", (0, 4), "disk/shard.gguf")
print("again, with room:", path.read_bytes() == pathlib.Path("by-hand.gguf").read_bytes())
P
unshare -rm bash -c 'mount -t tmpfs -o size=24m none disk && python filling.py'

said "input cut short, in the weights and in the header"
head -c -100000 model.gguf > cut.gguf
fails hotkv-trio slice cut.gguf --layers 0:4 --out x.gguf
head -c 1000 model.gguf > header.gguf
fails hotkv-trio slice header.gguf --layers 0:4 --out x.gguf

said "foreign input, none at all, a bad cut"
fails hotkv-trio slice make.py --layers 0:4 --out x.gguf
fails hotkv-trio slice absent.gguf --layers 0:4 --out x.gguf
fails hotkv-trio slice model.gguf --layers 3:12 --out x.gguf
[ ! -e x.gguf ] && echo "nothing was written"
