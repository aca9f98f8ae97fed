/* A stand-in for NVIDIA's libnvidia-ml.so.1: the calls that the launcher makes, answered from the machine that
 * $FAKE_NVML names. Structures follow nvml.h. */
#include <stdlib.h>
#include <stdio.h>
#include <string.h>

typedef unsigned int uint;
typedef unsigned long long ull;
typedef int status;

enum {
    SUCCESS = 0, INVALID_ARGUMENT = 2, NOT_SUPPORTED = 3, NO_PERMISSION = 4, NOT_FOUND = 6, INSUFFICIENT_SIZE = 7,
    DRIVER_NOT_LOADED = 9, GPU_IS_LOST = 15, LIB_RM_VERSION_MISMATCH = 18, NO_DATA = 21
};

typedef struct { uint pid; ull used; uint gpu_instance, compute_instance; } process;
typedef struct { ull total, free, used; } memory;
typedef struct { char legacy[16]; uint domain, bus, device, pci_device, pci_subsystem; char bus_id[32]; } pci;
typedef struct { uint gpu, memory; } utilization;
typedef struct { const char *uuid, *name; ull total_mib, free_mib; } slice;

typedef struct {
    const char *uuid, *name, *bus_id;
    int major, minor;
    ull total_mib, free_mib;
    int display, has_ecc;
    ull ecc_errors;
    int is_unreachable;   /* no handle at all */
    int is_lost;          /* a handle, and then no answer */
    int has_mig;
    slice slices[3];
    process compute[3], graphics[3];
} card;

typedef struct { const char *name; status init; int cuda; const char *driver; int p2p; card cards[3]; } machine;

#define UUID(n) "GPU-00000000-0000-4000-8000-00000000000" n
#define RTX3090(n, bus) .uuid = UUID(n), .name = "NVIDIA GeForce RTX 3090", .bus_id = bus, .major = 8, .minor = 6, \
    .total_mib = 24576, .free_mib = 24100
#define UNKNOWN_MEMORY (~0ull)

static const machine machines[] = {
    {.name = "no_driver", .init = DRIVER_NOT_LOADED},
    {.name = "version_mismatch", .init = LIB_RM_VERSION_MISMATCH},
    {.name = "no_cards", .cuda = 13000, .driver = "580.126.09"},
    {.name = "one_card", .cuda = 13030, .driver = "610.43.02",
     .cards = {{RTX3090("1", "00000000:04:00.0"), .free_mib = 22589, .display = 1,
                .compute = {{.pid = 300, .used = 512ull << 20}, {.pid = 200, .used = UNKNOWN_MEMORY}},
                .graphics = {{.pid = 2411, .used = 1331ull << 20}, {.pid = 300, .used = 100ull << 20}}}}},
    {.name = "two_cards", .cuda = 13000, .driver = "580.142", .p2p = 5,
     .cards = {{RTX3090("1", "00000000:01:00.0")}, {RTX3090("2", "00000000:05:00.0")}}},
    {.name = "two_cards_with_p2p", .cuda = 13000, .driver = "580.142", .p2p = 0,
     .cards = {{RTX3090("1", "00000000:01:00.0")}, {RTX3090("2", "00000000:05:00.0")}}},
    {.name = "unreachable_card", .cuda = 13000, .driver = "610.57.04",
     .cards = {{RTX3090("1", "00000000:01:00.0")}, {RTX3090("2", "00000000:09:00.0"), .is_unreachable = 1}}},
    {.name = "lost_card", .cuda = 13000, .driver = "610.57.04",
     .cards = {{RTX3090("1", "00000000:01:00.0")}, {RTX3090("2", "00000000:09:00.0"), .is_lost = 1}}},
    {.name = "mig", .cuda = 13000, .driver = "580.105.08",
     .cards = {{.uuid = UUID("a"), .name = "NVIDIA H100 80GB HBM3", .bus_id = "00000000:18:00.0", .major = 9,
                .total_mib = 81559, .free_mib = 81000, .has_ecc = 1, .ecc_errors = 3, .has_mig = 1,
                .slices = {{"MIG-00000000-0000-4000-8000-00000000c0de", "NVIDIA H100 80GB HBM3 MIG 2g.20gb", 20096, 20080},
                           {0},
                           {"MIG-00000000-0000-4000-8000-00000000c0df", "NVIDIA H100 80GB HBM3 MIG 1g.10gb", 9984, 9970}}}}},
    {.name = "shared_memory", .cuda = 13040, .driver = "615.69",
     .cards = {{.uuid = UUID("8"), .name = "NVIDIA RTX Spark N1X", .bus_id = "00000000:01:00.0", .major = 12, .minor = 1,
                .total_mib = UNKNOWN_MEMORY}}},
};

static const machine *here(void) {
    const char *wanted = getenv("FAKE_NVML");
    for (size_t i = 0; i < sizeof machines / sizeof *machines; i++)
        if (wanted && !strcmp(machines[i].name, wanted)) return &machines[i];
    fprintf(stderr, "fake_nvml: FAKE_NVML=%s: no such machine\n", wanted ? wanted : "");
    abort();
}

static const slice *as_slice(const void *handle) {
    for (int i = 0; i < 3; i++)
        for (int j = 0; j < 3; j++)
            if (handle == &here()->cards[i].slices[j]) return handle;
    return NULL;
}

static status text(const char *value, char *out, uint size) {
    if (strlen(value) >= size) return INSUFFICIENT_SIZE;
    strcpy(out, value);
    return SUCCESS;
}

static status processes(const process *listed, uint *count, process *out) {
    uint found = 0;
    while (found < 3 && listed[found].pid) found++;
    if (!found) { *count = 0; return SUCCESS; }
    if (!out || *count < found) { *count = found; return INSUFFICIENT_SIZE; }
    memcpy(out, listed, found * sizeof *out);
    *count = found;
    return SUCCESS;
}

status nvmlInitWithFlags(uint flags) { (void)flags; return here()->init; }
status nvmlShutdown(void) { return SUCCESS; }
const char *nvmlErrorString(status code) { (void)code; return "Unknown Error"; }

status nvmlSystemGetDriverVersion(char *out, uint size) { return text(here()->driver, out, size); }
status nvmlSystemGetCudaDriverVersion_v2(int *version) { *version = here()->cuda; return SUCCESS; }

status nvmlSystemGetProcessName(uint pid, char *out, uint size) {
    switch (pid) {
    case 2411: return text("/usr/bin/gnome-shell", out, size);
    case 200: return NO_PERMISSION;
    default: return text("caf\xe9", out, size);  /* not UTF-8 */
    }
}

status nvmlDeviceGetCount_v2(uint *count) {
    for (*count = 0; *count < 3 && here()->cards[*count].uuid; ++*count) {}
    return SUCCESS;
}

status nvmlDeviceGetHandleByIndex_v2(uint index, const void **handle) {
    const card *found = &here()->cards[index];
    if (found->is_unreachable) return GPU_IS_LOST;
    *handle = found;
    return SUCCESS;
}

status nvmlDeviceGetPciInfo_v3(const card *device, pci *out) { return text(device->bus_id, out->bus_id, 32); }

status nvmlDeviceGetUUID(const void *device, char *out, uint size) {
    const slice *mig = as_slice(device);
    if (mig) return text(mig->uuid, out, size);
    return ((const card *)device)->is_lost ? GPU_IS_LOST : text(((const card *)device)->uuid, out, size);
}

status nvmlDeviceGetName(const void *device, char *out, uint size) {
    const slice *mig = as_slice(device);
    return text(mig ? mig->name : ((const card *)device)->name, out, size);
}

status nvmlDeviceGetMemoryInfo(const void *device, memory *out) {
    const slice *mig = as_slice(device);
    const card *whole = device;
    if (!mig && whole->is_lost) return GPU_IS_LOST;
    if (!mig && whole->total_mib == UNKNOWN_MEMORY) return NOT_SUPPORTED;
    out->total = (mig ? mig->total_mib : whole->total_mib) << 20;
    out->free = (mig ? mig->free_mib : whole->free_mib) << 20;
    out->used = out->total - out->free;
    return SUCCESS;
}

status nvmlDeviceGetCudaComputeCapability(const card *device, int *major, int *minor) {
    *major = device->major;
    *minor = device->minor;
    return SUCCESS;
}

status nvmlDeviceGetDisplayActive(const card *device, uint *active) { *active = device->display; return SUCCESS; }

status nvmlDeviceGetUtilizationRates(const card *device, utilization *out) {
    if (device->has_mig) return NOT_SUPPORTED;
    out->gpu = 7;
    out->memory = 3;
    return SUCCESS;
}

status nvmlDeviceGetTotalEccErrors(const card *device, uint type, uint counter, ull *count) {
    if (!device->has_ecc) return NOT_SUPPORTED;
    if (type != 1 || counter != 0) return INVALID_ARGUMENT;  /* uncorrected, volatile */
    *count = device->ecc_errors;
    return SUCCESS;
}

status nvmlDeviceGetMigMode(const card *device, uint *current, uint *pending) {
    if (!device->has_mig) return NOT_SUPPORTED;
    *current = *pending = 1;
    return SUCCESS;
}

status nvmlDeviceGetMaxMigDeviceCount(const card *device, uint *count) { (void)device; *count = 3; return SUCCESS; }

status nvmlDeviceGetMigDeviceHandleByIndex(const card *device, uint index, const void **handle) {
    if (!device->slices[index].uuid) return NOT_FOUND;
    *handle = &device->slices[index];
    return SUCCESS;
}

status nvmlDeviceGetComputeRunningProcesses_v3(const card *device, uint *count, process *out) {
    return processes(device->compute, count, out);
}

status nvmlDeviceGetGraphicsRunningProcesses_v3(const card *device, uint *count, process *out) {
    return processes(device->graphics, count, out);
}

status nvmlDeviceGetP2PStatus(const card *one, const card *two, uint index, uint *result) {
    if (one == two || index != 0) return INVALID_ARGUMENT;  /* 0: read */
    *result = here()->p2p;
    return SUCCESS;
}

/* Of the machines' cards, those with ECC tell why their clocks are low. */
status nvmlDeviceGetCurrentClocksThrottleReasons(const card *device, ull *reasons) {
    if (!device->has_ecc) return NOT_SUPPORTED;
    *reasons = 0x44;  /* power limit, heat (hardware) */
    return SUCCESS;
}

status nvmlDeviceGetClockInfo(const card *device, uint type, uint *mhz) {
    (void)device;
    if (type != 1) return INVALID_ARGUMENT;  /* SM */
    *mhz = 1410;
    return SUCCESS;
}

status nvmlDeviceGetMaxClockInfo(const card *device, uint type, uint *mhz) {
    (void)device;
    if (type != 1) return INVALID_ARGUMENT;
    *mhz = 2100;
    return SUCCESS;
}

status nvmlDeviceGetTemperature(const card *device, uint sensor, uint *celsius) {
    (void)device;
    if (sensor != 0) return INVALID_ARGUMENT;  /* GPU */
    *celsius = 71;
    return SUCCESS;
}

status nvmlDeviceGetPowerUsage(const card *device, uint *mw) { (void)device; *mw = 349500; return SUCCESS; }
status nvmlDeviceGetEnforcedPowerLimit(const card *device, uint *mw) { (void)device; *mw = 350000; return SUCCESS; }
