/* A stand-in for the CUDA driver on machines without one, for the tests only.
 *
 * The wheels of Legate are linked to libcuda.so.1, but call nothing in it when they run on the CPU beyond asking
 * whether there is a device. It answers as a driver without devices does. Built by `make stub`, loaded by
 * lmfit_gpu.launch when LMFIT_GPU_LIBCUDA names it and no driver is found.
 */

enum { SUCCESS = 0, NOT_INITIALIZED = 3, NO_DEVICE = 100 };

int cuInit(unsigned int flags) { (void)flags; return NO_DEVICE; }

int cuDriverGetVersion(int *version) { if (version) *version = 0; return SUCCESS; }

int cuMemFree_v2(unsigned long long pointer) { (void)pointer; return NOT_INITIALIZED; }

int cuMemFreeHost(void *pointer) { (void)pointer; return NOT_INITIALIZED; }

int cuGetErrorString(int error, const char **text)
{
    *text = error == NO_DEVICE ? "no CUDA device: this is the stand-in of lmfit_gpu's tests" : "not initialized";
    return SUCCESS;
}

int cuGetErrorName(int error, const char **name)
{
    *name = error == NO_DEVICE ? "CUDA_ERROR_NO_DEVICE" : "CUDA_ERROR_NOT_INITIALIZED";
    return SUCCESS;
}
