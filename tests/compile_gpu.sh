#!/usr/bin/env bash
# Compiles every csrc/gpu/*.cu with no GPU and no torch:
#   tests/compile_gpu.sh hip gfx942 gfx1100      with clang-19 and the AMD device libraries (Debian's packages, or ROCm's)
#   tests/compile_gpu.sh cuda 75 90a             with nvcc
# Objects go to build/compile_gpu; a file is compiled again only if it, a header or this script changed.
set -euo pipefail
cd "$(dirname "$0")/.."
vendor=${1:?hip or cuda}
shift
out=build/compile_gpu/$vendor-$(IFS=-; echo "$*")
mkdir -p "$out"

flags=(-std=c++20 -O3 -Icsrc -DLIGER_BACKEND=gpu -fPIC)
case $vendor in
  hip)
    # Debian's device libraries know no chip after gfx1036; what they say of a chip's version is only its number, so that a link
    # to the newest one serves.
    libraries=$(dirname "$(find /usr/lib /opt/rocm -name hip.bc 2>/dev/null | head -n 1)")
    [ -f "$libraries/hip.bc" ] || { echo "no AMD device libraries found: install rocm-device-libs"; exit 1; }
    mkdir -p build/compile_gpu/bitcode
    ln -sf "$libraries"/*.bc build/compile_gpu/bitcode/
    for version in 90a 942 1100 1201; do
      target=build/compile_gpu/bitcode/oclc_isa_version_$version.bc
      [ -e "$target" ] || ln -s "$libraries/oclc_isa_version_1036.bc" "$target"
    done
    compiler=$(command -v clang++-19 || command -v amdclang++)
    compile=("$compiler" -x hip "${@/#/--offload-arch=}" "${flags[@]}" --rocm-path=/usr --rocm-device-lib-path=build/compile_gpu/bitcode -c)
    ;;
  cuda)
    compiler=$(command -v nvcc || echo /usr/local/cuda/bin/nvcc)
    codes=()
    for arch in "$@"; do codes+=(-gencode "arch=compute_$arch,code=sm_$arch"); done
    flags=("${flags[@]/#-fPIC/-Xcompiler=-fPIC}")
    compile=("$compiler" "${codes[@]}" "${flags[@]}" --expt-relaxed-constexpr -diag-suppress=20012 -c)
    ;;
  *) echo "unknown: $vendor"; exit 1 ;;
esac

newest=$(find csrc "$0" \( -name '*.h' -o -name '*.sh' \) -printf '%T@ %p\n' | sort -n | tail -n 1 | cut -d' ' -f2)
failed=()
running=()   # processes and what they compile, in the order of their start
finish_first() {
  wait "${running[0]%% *}" || failed+=("${running[0]#* }")
  running=("${running[@]:1}")
}
for source in csrc/gpu/*.cu; do
  object=$out/$(basename "$source").o
  [ "$object" -nt "$source" ] && [ "$object" -nt "$newest" ] && continue
  [ "${#running[@]}" -lt "$(nproc)" ] || finish_first
  echo "$vendor $*: $source"
  "${compile[@]}" "$source" -o "$object" &
  running+=("$! $source")
done
while [ "${#running[@]}" -gt 0 ]; do finish_first; done
[ "${#failed[@]}" = 0 ] || { echo "did not compile for $vendor $*: ${failed[*]}"; exit 1; }
echo "compiled for $vendor $*"
