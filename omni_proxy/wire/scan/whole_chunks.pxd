cpdef bint are_whole_chunks(bytes piece) noexcept
