#!/usr/bin/env bash
# Compiles every .cu with CUDA 12.9 into build/compile-cuda12/<architecture>/*.cubin, device side only. PyPI has no nvcc of CUDA 12, but has
# its assembler, device library and headers. So clang-19 compiles, and ptxas 12.9 assembles, as in a build with nvcc 12.9. clang-19 has no
# Blackwell; PTX 8.5 is the newest that it writes.
#   tests/compile_cuda12.sh           pip comes from .venv, if it exists, else from the PATH
set -euo pipefail
cd "$(dirname "$0")/.."
[ -d .venv ] && PATH=$PWD/.venv/bin:$PATH
build=build/compile-cuda12   # relative, so that checkouts can share a compiler cache
packages=(nvidia-cuda-nvcc-cu12==12.9.86 nvidia-cuda-runtime-cu12==12.9.79 nvidia-cuda-cccl-cu12==12.9.27)
archs=(sm_70 sm_75 sm_80 sm_86 sm_89 sm_90a)
rm -rf "$build/done" "$build"/sm_*

# A toolkit as clang expects one: include, bin, nvvm in one folder.
if [ ! -e "$build/toolkit/ready" ]; then
  rm -rf "$build"
  mkdir -p "$build/toolkit/bin"
  python3 -m pip install --quiet --no-deps --target "$build/packages" "${packages[@]}"
  cp -r "$build"/packages/nvidia/cuda_*/include "$build/toolkit/"
  cp -r "$build/packages/nvidia/cuda_nvcc/nvvm" "$build/toolkit/"
  install -m 755 "$build/packages/nvidia/cuda_nvcc/bin/ptxas" "$build/toolkit/bin/"
  touch "$build/toolkit/include/curand_mtgp32_kernel.h" "$build/toolkit/ready"   # clang includes it; nothing here uses it
fi

# clang must inline every function, as nvcc does: otherwise an array whose address is passed lies in local memory.
compile() {
  $cache clang++-19 -x cuda --cuda-gpu-arch="$2" --cuda-device-only --cuda-path="$1/toolkit" -include tests/clang_cuda.h \
    -Wno-unknown-cuda-version -Wno-unknown-attributes -O3 -mllvm -inline-threshold=100000 -std=c++20 -DLIGER_BACKEND=gpu -Icsrc \
    -c "$3" -o "$1/$2/$(basename "$3" .cu).cubin"
}
export -f compile
export CCACHE_BASEDIR=$PWD CCACHE_NOHASHDIR=1 CCACHE_EXTRAFILES=$build/toolkit/bin/ptxas cache
cache=$(command -v ccache || true)
mkdir -p "${archs[@]/#/$build/}"
for arch in "${archs[@]}"; do printf "$arch %s\n" csrc/gpu/*.cu; done | xargs -P "$(nproc)" -L 1 bash -c 'compile "$0" "$@"' "$build"
touch "$build/done"   # pytest reads the cubins of a complete run
echo "$(ls "$build"/sm_*/*.cubin | wc -l) of $((${#archs[@]} * $(ls csrc/gpu/*.cu | wc -l))) cubins with CUDA 12.9, ${archs[*]}, $SECONDS s"
