# Runs every compiler through ccache, if it is installed. All checkouts share ccache's folder: paths in a checkout are hashed relative to
# it, and the folder in which a compiler runs is not hashed. LIGER_COMPILER_CACHE is the prefix for commands whose launcher CMake does not
# set.
set(LIGER_COMPILER_CACHE "")
find_program(LIGER_CCACHE ccache NO_CACHE)
if(LIGER_CCACHE)
  set(LIGER_COMPILER_CACHE "${CMAKE_COMMAND}" -E env "CCACHE_BASEDIR=${CMAKE_SOURCE_DIR}" CCACHE_NOHASHDIR=1 "${LIGER_CCACHE}")
  foreach(language C CXX CUDA)
    if(NOT CMAKE_${language}_COMPILER_LAUNCHER)
      set(CMAKE_${language}_COMPILER_LAUNCHER ${LIGER_COMPILER_CACHE})
    endif()
  endforeach()
endif()
