# Builds the CPU library. csrc/cpu/<op>.cpp is compiled once per instruction set, in a namespace of its own. Threads and the choice of the
# instruction set are in csrc/cpu/dispatch*.cpp, which is compiled for the baseline, as is everything that includes torch.
file(GLOB cpu_baseline CONFIGURE_DEPENDS "${CMAKE_SOURCE_DIR}/csrc/cpu/dispatch*.cpp" "${CMAKE_SOURCE_DIR}/csrc/cpu/gemm*.cpp")
file(GLOB cpu_kernels CONFIGURE_DEPENDS "${CMAKE_SOURCE_DIR}/csrc/cpu/*.cpp")
list(REMOVE_ITEM cpu_kernels ${cpu_baseline})
# Both files are compiled as one, since they share most of their code, the sums of a row.
file(GLOB cross_entropy CONFIGURE_DEPENDS "${CMAKE_SOURCE_DIR}/csrc/cpu/cross_entropy*.cpp")
set_source_files_properties(${cross_entropy} PROPERTIES UNITY_GROUP cross_entropy)

# Schemas and ops, also for the host target of the GPU kernels.
add_library(liger_ops_cpu OBJECT csrc/schemas.cpp ${LIGER_OPS})
target_include_directories(liger_ops_cpu PRIVATE csrc)
target_compile_definitions(liger_ops_cpu PRIVATE LIGER_BACKEND=cpu LIGER_DISPATCH_KEY=CPU LIGER_IS_GPU=0)
target_link_libraries(liger_ops_cpu PRIVATE liger_torch)

add_library(liger_ext_cpu SHARED $<TARGET_OBJECTS:liger_ops_cpu> ${cpu_baseline})
target_include_directories(liger_ext_cpu PRIVATE csrc)
target_compile_definitions(liger_ext_cpu PRIVATE LIGER_BACKEND=cpu)
target_link_libraries(liger_ext_cpu PRIVATE liger_torch ${CMAKE_DL_LIBS})

set(optimized -O3)
if(LIGER_EXT_SANITIZE)
  set(optimized -O1)   # with -O3, code with a sanitizer takes minutes to compile
endif()
set(isas baseline)
set(flags_baseline "")
if(LIGER_EXT_SANITIZE MATCHES "thread")
  # The baseline alone: ThreadSanitizer checks accesses of up to 16 bytes, but none of wider vectors. The library calls the parallel_for of
  # thread_sanitizer.cpp instead of torch's, whichever was loaded first.
  target_sources(liger_ext_cpu PRIVATE tests/thread_sanitizer.cpp)
  target_link_options(liger_ext_cpu PRIVATE -Wl,-Bsymbolic-functions)
elseif(CMAKE_SYSTEM_PROCESSOR MATCHES "x86_64|AMD64")
  list(APPEND isas avx2)
  if(LIGER_EXT_SANITIZE AND EXISTS /proc/cpuinfo)
    file(STRINGS /proc/cpuinfo of_this_machine REGEX "^flags.* avx512dq" LIMIT_COUNT 1)
  endif()
  if(of_this_machine OR NOT LIGER_EXT_SANITIZE)   # a library with sanitizers runs on the machine that built it
    list(APPEND isas avx512)
  endif()
  set(flags_avx2 -mavx2 -mfma -mf16c)
  set(flags_avx512 -mavx512f -mavx512bw -mavx512vl -mavx512dq -mavx2 -mfma -mf16c -mprefer-vector-width=512)
endif()
option(LIGER_EXT_CPU_NATIVE "compile the CPU kernels for this machine's best instruction set alone (make demo)" OFF)
if(LIGER_EXT_CPU_NATIVE AND EXISTS /proc/cpuinfo)
  file(STRINGS /proc/cpuinfo flags REGEX "^flags" LIMIT_COUNT 1)
  foreach(isa ${isas})   # from the lowest to the highest
    if(isa STREQUAL baseline OR (isa STREQUAL avx2 AND flags MATCHES " avx2 ") OR (isa STREQUAL avx512 AND flags MATCHES " avx512dq "))
      set(best ${isa})
    endif()
  endforeach()
  set(isas ${best})
endif()
foreach(isa ${isas})
  add_library(liger_cpu_${isa} OBJECT ${cpu_kernels})
  target_include_directories(liger_cpu_${isa} PRIVATE csrc)
  target_compile_definitions(liger_cpu_${isa} PRIVATE LIGER_BACKEND=cpu LIGER_ISA=${isa})
  # Results may differ between instruction sets, by the order of sums and by multiply-adds. -fno-math-errno makes sqrt one instruction.
  target_compile_options(liger_cpu_${isa} PRIVATE ${flags_${isa}} ${optimized} -fno-math-errno -Wno-psabi -Wno-ignored-attributes)
  set_target_properties(liger_cpu_${isa} PROPERTIES UNITY_BUILD ON UNITY_BUILD_MODE GROUP)
  target_link_libraries(liger_ext_cpu PRIVATE $<TARGET_OBJECTS:liger_cpu_${isa}>)
  string(TOUPPER ${isa} upper)
  target_compile_definitions(liger_ext_cpu PRIVATE LIGER_HAS_${upper}=1)
endforeach()
liger_build_facts(liger_ext_cpu cpu "${cxx}" "")
install(TARGETS liger_ext_cpu LIBRARY DESTINATION liger_ext/lib)
