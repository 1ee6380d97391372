/* Shared mappings whose huge pages can be mapped as such.
 *
 * A file's huge page (2 MiB of a tmpfs) is one entry of the page table, and one fault, only where
 * the distance between address and file position is a multiple of its size.  The kernel sees to
 * that by itself only on file systems mounted with huge=.
 */
#ifndef KD_HUGE_MAP_H
#define KD_HUGE_MAP_H

#include <errno.h>
#include <fcntl.h>
#include <stdint.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/vfs.h>
#include <unistd.h>

#define KD_HUGE_BYTES ((size_t)2 << 20)
#define KD_TMPFS_MAGIC 0x01021994

#ifndef MADV_COLLAPSE
#define MADV_COLLAPSE 25 /* Linux 6.1 */
#endif

/* mmap(NULL, length, protection, MAP_SHARED, fd, position), at a suitable address. */
static inline void *kd_map_shared(int fd, size_t length, int protection, int64_t position) {
    if (length >= KD_HUGE_BYTES) {
        uint8_t *reserved = (uint8_t *)mmap(NULL, length + KD_HUGE_BYTES, PROT_NONE,
                                            MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (reserved != (uint8_t *)MAP_FAILED) {
            size_t skip =
                (size_t)(((uintptr_t)position - (uintptr_t)reserved) & (KD_HUGE_BYTES - 1));
            size_t page = (size_t)getpagesize(), mapped = (length + page - 1) & ~(page - 1);
            void *p = mmap(reserved + skip, length, protection, MAP_SHARED | MAP_FIXED, fd,
                           (off_t)position);
            if (p != MAP_FAILED) {
                if (skip)
                    munmap(reserved, skip);
                if (mapped + skip < length + KD_HUGE_BYTES)
                    munmap(reserved + skip + mapped, length + KD_HUGE_BYTES - mapped - skip);
                return p;
            }
            munmap(reserved, length + KD_HUGE_BYTES);
        }
    }
    return mmap(NULL, length, protection, MAP_SHARED, fd, (off_t)position);
}

/* Extend a file of a tmpfs to `length` bytes, if it is shorter, and back it with huge pages as far
 * as there are any, whatever the mount's huge= says.  Returns 0 or an errno.  Small pages that
 * exist are moved into huge ones; where there is no huge page the file has holes. */
static inline int kd_allocate_huge(int fd, size_t length) {
    struct statfs fs;
    struct stat st;
    size_t whole = length & ~(KD_HUGE_BYTES - 1);
    int rc = 0;
    if (!whole || fstatfs(fd, &fs) != 0 || fs.f_type != KD_TMPFS_MAGIC)
        return EOPNOTSUPP;
    /* Never shorten it: whoever has mapped the bytes after its new end would get a bus error. */
    if (fstat(fd, &st) != 0 || ((size_t)st.st_size < length && ftruncate(fd, (off_t)length) != 0))
        return errno;
    /* The kernel collapses only what has a page already, so give each stretch one. */
    for (size_t at = 0; at < whole; at += KD_HUGE_BYTES)
        if (fallocate(fd, 0, (off_t)at, 4096) != 0)
            return errno;
    void *p = kd_map_shared(fd, whole, PROT_READ | PROT_WRITE, 0);
    if (p == MAP_FAILED)
        return errno;
    if (madvise(p, whole, MADV_COLLAPSE) != 0)
        rc = errno;
    munmap(p, whole);
    return rc;
}

#endif
