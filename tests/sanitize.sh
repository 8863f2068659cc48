#!/usr/bin/env bash
# Runs the tests of ops on the CPU and of launch plans with the CPU library and _C built with clang-19's sanitizers:
#   tests/sanitize.sh address,undefined    memory errors, and what C++ leaves undefined
# A finding ends the run and is shown. Further arguments go to pytest. The build, beside links to the package's Python files, is in
# build/sanitize-<first sanitizer>/liger_ext.
set -euo pipefail
cd "$(dirname "$0")/.."
sanitizers=${1:?address,undefined}
shift
[ -d .venv ] && PATH=$PWD/.venv/bin:$PATH
build=$PWD/build/sanitize-${sanitizers%%,*}
cmake -G Ninja -S . -B "$build" -DPython_EXECUTABLE="$(python3 -c 'import sys; print(sys.executable)')" -DCMAKE_CXX_COMPILER=clang++-19 \
  -DCMAKE_C_COMPILER=clang-19 -DCMAKE_BUILD_TYPE=RelWithDebInfo -DLIGER_EXT_GPU=none -DLIGER_EXT_SANITIZE="$sanitizers" \
  -DLIGER_EXT_OUTPUT="$build/liger_ext/lib" --log-level=WARNING
cmake --build "$build"
ln -sfn "$PWD"/liger_ext/*.py "$PWD"/liger_ext/{models,ops,references} "$build/liger_ext/"

# Of address,undefined AddressSanitizer's library serves both. Python is not built with it, so it is loaded first; reports go to files,
# since pytest keeps what is printed.
rm -f "$build"/report.*
report=log_path=$build/report
export ASAN_OPTIONS=detect_leaks=0:malloc_context_size=3:quarantine_size_mb=32:$report UBSAN_OPTIONS=print_stacktrace=1:$report
files=()
for name in sanitizer library bad_input plans rms_norm layer_norm glu rope softmax cross_entropy fused_linear_cross_entropy gradients; do
  files+=("$PWD/tests/test_$name.py")
done
cd "$build"   # Python finds liger_ext here before the one of the sources
LD_PRELOAD="$(clang++-19 -print-file-name="libclang_rt.asan-$(uname -m).so") $(clang++-19 -print-file-name=libstdc++.so.6)" \
  setarch -R python3 -m pytest -k "not compile and not opcheck and not wide" "$@" "${files[@]}" || { cat "$build"/report.* 2>/dev/null; exit 1; }
