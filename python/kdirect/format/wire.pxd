"""Numbers in bytes, declared once for all compiled modules: see wire.h."""
from libc.stdint cimport int64_t, uint8_t, uint16_t, uint32_t, uint64_t

cdef extern from "wire.h" nogil:
    # big endian: Kafka's
    uint8_t kd_get8(const uint8_t* p)
    uint16_t kd_get16(const uint8_t* p)
    uint32_t kd_get32(const uint8_t* p)
    uint64_t kd_get64(const uint8_t* p)
    void kd_put16(uint8_t* p, uint16_t v)
    void kd_put32(uint8_t* p, uint32_t v)
    void kd_put64(uint8_t* p, uint64_t v)
    # little endian: our own layouts, and some codecs
    uint16_t kd_get_le16(const uint8_t* p)
    uint32_t kd_get_le32(const uint8_t* p)
    uint64_t kd_get_le64(const uint8_t* p)
    void kd_put_le16(uint8_t* p, uint16_t v)
    void kd_put_le32(uint8_t* p, uint32_t v)
    void kd_put_le64(uint8_t* p, uint64_t v)
    uint64_t KD_LE64(uint64_t v)
    # zigzag varints
    int kd_varint_size(int64_t v)
    const uint8_t* kd_get_varint(const uint8_t* p, const uint8_t* end, int64_t* out)
    uint8_t* kd_put_varint(uint8_t* p, int64_t v)
    void kd_prefetch(const void* p)
