#!/usr/bin/env bash
# Build llama.cpp's own programs, once: llama-quantize (for the K types of an export) and llama-server.
#
#     tools/llama_cpp.sh [JOBS] [SDIST]     compilers at once (default: all cores); a source package that is here already
#
# The source is the one inside the source package of llama-cpp-python on PyPI (76 MB, pinned by hash), so the same version
# everywhere and no other site is asked. Nine CPU minutes; needs cmake 3.21, a C++17 compiler and 500 MB. The programs go
# to .athanor/llama.cpp/bin, where the project finds them.
set -euo pipefail
cd "$(dirname "$0")/.."
version=0.3.36
sha256=832db0699007f1be95a7e41ef12e88926b02ba836461e36a36372db2760c1a2e
programs=(llama-quantize llama-server)
home=$PWD/.athanor/llama.cpp
jobs=${1:-$(nproc)}
archive=${2:-$home/llama_cpp_python-$version.tar.gz}

if [ "$(cat "$home/bin/built" 2>/dev/null)" = "$sha256" ]; then
    echo "already built: $home/bin"
    exit
fi
command -v cmake >/dev/null || { echo "cmake is not installed. Fix: apt install cmake g++, or pip install cmake ninja" >&2; exit 1; }
mkdir -p "$home"
echo "$sha256  $archive" | sha256sum --check --status 2>/dev/null ||
    python3 -m pip download --no-deps --no-binary llama-cpp-python "llama-cpp-python==$version" -d "$home"
echo "$sha256  $archive" | sha256sum --check --quiet || { echo "$archive is not llama-cpp-python $version" >&2; exit 1; }

scratch=$(mktemp -d "$home/build-XXXX")
trap 'rm -rf "$scratch"' EXIT
tar -xzf "$archive" -C "$scratch"
# -O1 takes a quarter off the compile time; a small model runs as fast. The web page that the server would show is
# otherwise fetched from a model hub in the middle of the build.
cmake -S "$scratch/llama_cpp_python-$version/vendor/llama.cpp" -B "$scratch/build" \
    -DCMAKE_BUILD_TYPE=Release -DCMAKE_C_FLAGS_RELEASE="-O2 -DNDEBUG" -DCMAKE_CXX_FLAGS_RELEASE="-O1 -DNDEBUG" \
    -DBUILD_SHARED_LIBS=OFF -DGGML_CCACHE=ON -DLLAMA_OPENSSL=OFF -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF \
    -DLLAMA_BUILD_APP=OFF -DLLAMA_BUILD_SERVER=ON -DLLAMA_BUILD_UI=OFF -DLLAMA_USE_PREBUILT_UI=OFF
cmake --build "$scratch/build" -j "$jobs" --target "${programs[@]}"
mkdir "$scratch/bin"
for program in "${programs[@]}"; do
    cp "$scratch/build/bin/$program" "$scratch/bin/"
done
"$scratch/bin/llama-server" --version
echo "$sha256" > "$scratch/bin/built"
rm -rf "$home/bin"
mv "$scratch/bin" "$home/bin"
echo "programs are in $home/bin"
