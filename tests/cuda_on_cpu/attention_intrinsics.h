// What csattn/attention/intrinsics.cu has for the device.

static inline float exp2_of(float x) {
    const float value = std::exp2(x);
    return value < 1.17549435e-38f ? 0.0f : value;
}

// The standard normal's distribution and its inverse, and exp(x * x) * erfc(x) for x >= 0.
static inline float normcdff(float x) { return std::erfc(-x / std::sqrt(2.0)) / 2; }
static inline float normcdfinvf(float share) {
    if (share == 0) return -INFINITY;
    double low = -40, high = 40;
    for (int i = 0; i < 100; ++i) {
        const double middle = (low + high) / 2;
        (std::erfc(-middle / std::sqrt(2.0)) / 2 < share ? low : high) = middle;
    }
    return low;
}
static inline float erfcxf(float x) {
    if (x < 5) return std::exp(static_cast<double>(x) * x) * std::erfc(static_cast<double>(x));
    double fraction = x;
    for (int k = 40; k > 0; --k) fraction = x + k / 2.0 / fraction;
    return 1 / (fraction * std::sqrt(M_PI));
}

static inline void wait_for_earlier() {}
static inline void let_next_start() {}

static inline void start_copy(unsigned to, long long from, int count) {
    char* place = static_cast<char*>(__cvta_shared_to_generic(to));
    std::memset(place, 0, 16);
    if (count > 0) std::memcpy(place, reinterpret_cast<const void*>(from), count);
}
static inline void bring_near(const char*) {}
static inline void end_group() {}
template <int LEFT> static inline void wait_for_copies() {}

static inline void post(float* to, float4 x) { std::memcpy(to, &x, sizeof x); }
static inline float4 peek(const float* from) {
    pause_thread();  // another may be about to post
    float4 x;
    std::memcpy(&x, from, sizeof x);
    return x;
}

struct Arrivals {
    int& arrived;  // as often as all warps together

    Arrivals(void* memory) : arrived(*static_cast<int*>(memory)) {
        if (threadIdx.x == 0) arrived = 0;
    }
    void arrive() const {
        __syncwarp();
        if (threadIdx.x % 32 == 0) ++arrived;
    }
    void wait(int round) const {
        while (arrived < (round + 1) * WARPS) pause_thread();
    }
};
