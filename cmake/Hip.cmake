# Builds the GPU library for HIP. clang compiles the kernels, the same csrc/gpu/*.cu as for CUDA (ROCm's amdclang++, or a distribution's
# clang with its device libraries). Everything else is the same plain C++ as for CUDA.
set(LIGER_EXT_HIP_COMPILER "" CACHE FILEPATH "clang++ that compiles HIP (empty: amdclang++ of ROCm, else clang++-19, clang++)")
set(LIGER_EXT_HIP_FLAGS "" CACHE STRING "more flags for it, e.g. '--rocm-path=/opt/rocm'")

if(LIGER_EXT_HIP_COMPILER)
  set(hip_compiler "${LIGER_EXT_HIP_COMPILER}")
else()
  find_program(LIGER_HIP_CLANG NAMES amdclang++ clang++-19 clang++ HINTS $ENV{ROCM_PATH}/llvm/bin /opt/rocm/bin /opt/rocm/llvm/bin)
  if(NOT LIGER_HIP_CLANG)
    message(FATAL_ERROR "no compiler for HIP: install ROCm, or clang 19 with rocm-device-libs and libamdhip64-dev, "
                        "or name one by LIGER_EXT_HIP_COMPILER")
  endif()
  set(hip_compiler "${LIGER_HIP_CLANG}")
endif()

set(hip_flags -x hip -std=c++20 -O3 -fPIC -fvisibility=hidden -fvisibility-inlines-hidden -DLIGER_BACKEND=gpu)
separate_arguments(more_flags UNIX_COMMAND "${LIGER_EXT_HIP_FLAGS}")
list(APPEND hip_flags ${more_flags})
# By default the library has the architectures that the compiler supports: gfx950 is newer than clang 19.
execute_process(COMMAND "${hip_compiler}" --version OUTPUT_VARIABLE hip_version ERROR_QUIET)
string(REGEX MATCH "clang version [0-9.]+" hip_version "${hip_version}")
set(archs "")
set(wanted ${LIGER_EXT_HIP_ARCHS})
if(NOT wanted)
  set(wanted gfx90a gfx942 gfx950 gfx1100 gfx1201)
endif()
foreach(arch ${wanted})
  execute_process(COMMAND "${hip_compiler}" --target=amdgcn-amd-amdhsa -mcpu=${arch} -nogpulib -fsyntax-only -x c /dev/null
                  RESULT_VARIABLE refused ERROR_QUIET)
  if(NOT refused)
    list(APPEND archs ${arch})
  elseif(LIGER_EXT_HIP_ARCHS)
    message(FATAL_ERROR "LIGER_EXT_HIP_ARCHS has '${arch}', which ${hip_compiler} (${hip_version}) does not compile for")
  else()
    message(WARNING "the HIP library has no code for ${arch}, which ${hip_compiler} (${hip_version}) does not compile for")
  endif()
endforeach()
foreach(arch ${archs})
  list(APPEND hip_flags --offload-arch=${arch})
endforeach()
list(JOIN archs " " architectures)

# ROCm's compiler finds its own device libraries. A distribution's may be older than some of the targets. Then a folder of links provides
# the file of gfx1036 for each missing target. These files differ in nothing that the kernels use.
find_path(LIGER_ROCM_BITCODE ocml.bc HINTS $ENV{ROCM_PATH}/amdgcn/bitcode /opt/rocm/amdgcn/bitcode
          PATHS /usr/lib/${CMAKE_LIBRARY_ARCHITECTURE}/amdgcn/bitcode /usr/lib/x86_64-linux-gnu/amdgcn/bitcode /usr/amdgcn/bitcode)
if(LIGER_ROCM_BITCODE AND LIGER_ROCM_BITCODE MATCHES "^/usr/")
  set(bitcode "${CMAKE_BINARY_DIR}/rocm_bitcode")
  file(MAKE_DIRECTORY "${bitcode}")
  file(GLOB files "${LIGER_ROCM_BITCODE}/*.bc")
  foreach(file ${files})
    get_filename_component(name "${file}" NAME)
    file(CREATE_LINK "${file}" "${bitcode}/${name}" SYMBOLIC)
  endforeach()
  foreach(arch ${archs})
    string(REGEX REPLACE "^gfx([0-9a-f]+).*$" "\\1" number "${arch}")
    if(NOT EXISTS "${bitcode}/oclc_isa_version_${number}.bc")
      file(CREATE_LINK "${LIGER_ROCM_BITCODE}/oclc_isa_version_1036.bc" "${bitcode}/oclc_isa_version_${number}.bc" SYMBOLIC)
    endif()
  endforeach()
  list(APPEND hip_flags --rocm-path=/usr --rocm-device-lib-path=rocm_bitcode)   # relative, so that checkouts can share a compiler cache
endif()

# One command per file, with the compiler's own dependency list, so that a changed source rebuilds one object.
file(MAKE_DIRECTORY "${CMAKE_BINARY_DIR}/hip")
set(hip_cache ${LIGER_COMPILER_CACHE})
if(hip_cache AND LIGER_ROCM_BITCODE)   # clang reads the device libraries itself, unseen by ccache
  list(PREPEND hip_cache "${CMAKE_COMMAND}" -E env "CCACHE_EXTRAFILES=${LIGER_ROCM_BITCODE}/ocml.bc")
endif()
set(hip_objects "")
foreach(source ${gpu_sources})
  get_filename_component(name "${source}" NAME_WE)
  set(object "${CMAKE_BINARY_DIR}/hip/${name}.o")
  add_custom_command(
    OUTPUT "${object}"
    COMMAND ${hip_cache} "${hip_compiler}" ${hip_flags} "-DLIGER_EXT_GPU_ARCHS=\"${architectures}\"" -I "${CMAKE_SOURCE_DIR}/csrc"
            -MD -MF "${object}.d" -MT "${object}" -c "${source}" -o "${object}"
    WORKING_DIRECTORY "${CMAKE_BINARY_DIR}"
    DEPENDS "${source}" DEPFILE "${object}.d" COMMENT "HIP ${name}.cu" VERBATIM)
  list(APPEND hip_objects "${object}")
endforeach()
set_source_files_properties(${hip_objects} PROPERTIES EXTERNAL_OBJECT TRUE GENERATED TRUE)

# libamdhip64 is not linked: its symbols resolve through libtorch_hip's own dependency, so one library serves every ROCm major. If there is
# a libamdhip64, the stub depends on it, so that the library can be loaded with the stub.
find_library(LIGER_AMDHIP amdhip64 HINTS $ENV{ROCM_PATH}/lib /opt/rocm/lib)
liger_gpu_library(hip torch_hip "${hip_version}" "${architectures}" $<$<BOOL:${LIGER_AMDHIP}>:${LIGER_AMDHIP}>)
target_sources(liger_ext_hip PRIVATE ${hip_objects})

# A target for tests, built by name alone.
include("${CMAKE_SOURCE_DIR}/tests/amd/emulated.cmake" OPTIONAL)
