/* SelectChannel of Section 2.2 fused with the batch norm and ReLU before it, forward and backward.
 *
 * For each slot s:   y[s] = shift(relu(scale[c] * x[c] + offset[c]), b[s]),   c = index[s].
 * `selectconv.core.shift` is the definition; the tests compare this with it. Callers leave out closed slots.
 * Plain C, float32, one or two spatial axes, (N, C, H, W) or (N, H, W, C) in memory.
 * No atomics and no order of summation that depends on the number of threads: results are deterministic.
 */
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

typedef struct {
    int64_t channel;    /* that the slot reads */
    int64_t down, right; /* whole pixels of the shift */
    float far_down, far_right; /* its fractions, in [0, 1) */
    int is_shifted;
} Slot;

/* Sizes and layout of x, and the allocation of the open slots. `shift` is (slots, axes); NULL: nothing is
 * shifted. */
typedef struct {
    int64_t images, channels, height, width, slots;
    int32_t channels_last, axes, threads;
    const uint8_t *shifted;
    const int64_t *index;
    const float *shift;
} Shape;

/* Floats of scratch space that a shift needs, at most. */
#define SCRATCH(shape) (3 * (shape)->width + 2)

static void split_offset(float b, int64_t size, int64_t *whole, float *fraction) {
    float bound = (float)(size + 1); /* from `size` on the frame is empty */
    b = b < -bound ? -bound : b > bound ? bound : b;
    float down = floorf(b);
    *whole = down == down ? (int64_t)down : 0; /* NaN stays in the fraction */
    *fraction = b - down;
}

#define NO_MEMORY 1
#define BAD_INDEX 2

/* Returns NULL, and why in `failed`, if there is no memory or a slot reads a channel that does not exist. */
static Slot *read_slots(const Shape *shape, int *failed) {
    Slot *slots = calloc(shape->slots + 1, sizeof *slots);
    *failed = slots ? 0 : NO_MEMORY;
    for (int64_t i = 0; i < shape->slots && !*failed; i++) {
        Slot *slot = &slots[i];
        slot->channel = shape->index[i];
        if (slot->channel < 0 || slot->channel >= shape->channels) *failed = BAD_INDEX;
        slot->is_shifted = shape->shift != NULL && shape->shifted[i];
        if (slot->is_shifted) {
            const float *b = shape->shift + i * shape->axes;
            if (shape->axes == 2) split_offset(b[0], shape->height, &slot->down, &slot->far_down);
            split_offset(b[shape->axes - 1], shape->width, &slot->right, &slot->far_right);
        }
    }
    if (!*failed) return slots;
    free(slots);
    return NULL;
}

static inline float activate(float x, float scale, float offset) {
    float z = scale * x + offset;
    return z < 0 ? 0 : z; /* keeps NaN, as torch's ReLU does */
}

static void activate_plane(const float *restrict x, float *restrict y, int64_t size, float scale,
                           float offset) {
    for (int64_t i = 0; i < size; i++) y[i] = activate(x[i], scale, offset);
}

static int is_whole(const Slot *slot) { return slot->far_down == 0 && slot->far_right == 0; }

/* The columns [from, to) of a plane that read a column of the frame, `right` pixels away. */
static void find_columns(int64_t right, int64_t width, int64_t *from, int64_t *to) {
    *from = right < 0 ? (-right < width ? -right : width) : 0;
    *to = right > 0 ? width - right : width;
    if (*to < *from) *to = *from;
}

/* shift_plane by whole pixels: a copy. */
static void copy_plane(const float *restrict in, float *restrict out, const Slot *slot, int64_t height,
                       int64_t width) {
    int64_t from, to;
    find_columns(slot->right, width, &from, &to);
    for (int64_t y = 0; y < height; y++, out += width) {
        int64_t near = y + slot->down;
        int64_t start = near < 0 || near >= height ? width : from;
        memset(out, 0, start * sizeof *out);
        if (start == width) continue;
        memcpy(out + from, in + near * width + from + slot->right, (to - from) * sizeof *out);
        memset(out + to, 0, (width - to) * sizeof *out);
    }
}

/* Its transpose, added to `grad_in`. */
static void copy_plane_backward(const float *restrict grad_out, float *restrict grad_in, const Slot *slot,
                                int64_t height, int64_t width) {
    int64_t from, to;
    find_columns(slot->right, width, &from, &to);
    for (int64_t y = 0; y < height; y++, grad_out += width) {
        int64_t near = y + slot->down;
        if (near < 0 || near >= height) continue;
        float *to_row = grad_in + near * width + slot->right;
        for (int64_t x = from; x < to; x++) to_row[x] += grad_out[x];
    }
}

/* out[y][x] = (1 - f) * v[x + right] + f * v[x + right + 1], where v is likewise made of two rows.
 * `row`: width + 2 pixels of scratch space. */
static void shift_plane(const float *restrict in, float *restrict out, const Slot *slot, int64_t height,
                        int64_t width, float *restrict row) {
    if (is_whole(slot)) {
        copy_plane(in, out, slot, height, width);
        return;
    }
    int64_t right = slot->right;
    int64_t from = right < -1 ? -1 - right : 0, to = right > 0 ? width - right : width;
    if (from > width) from = width;
    if (to < from) to = from;
    float *values = row + 1, *moved = values + right;
    values[-1] = values[width] = 0; /* outside the frame */
    float far_y = slot->far_down, near_y = 1 - far_y, far_x = slot->far_right, near_x = 1 - far_x;
    for (int64_t y = 0; y < height; y++, out += width) {
        int64_t near = y + slot->down, far = near + 1;
        const float *a = near >= 0 && near < height ? in + near * width : NULL;
        const float *b = far >= 0 && far < height ? in + far * width : NULL;
        if (a && b)
            for (int64_t x = 0; x < width; x++) values[x] = near_y * a[x] + far_y * b[x];
        else if (a)
            for (int64_t x = 0; x < width; x++) values[x] = near_y * a[x];
        else if (b)
            for (int64_t x = 0; x < width; x++) values[x] = far_y * b[x];
        else {
            memset(out, 0, width * sizeof *out);
            continue;
        }
        for (int64_t x = 0; x < from; x++) out[x] = 0;
        for (int64_t x = from; x < to; x++) out[x] = near_x * moved[x] + far_x * moved[x + 1];
        for (int64_t x = to; x < width; x++) out[x] = 0;
    }
}

/* The transpose of shift_plane, added to `grad_in`, and the derivatives in the shift, unless `grad_shift`
 * is NULL.
 * `scratch`: 3 * width + 2 pixels: a padded row of the gradient, zeros, and a row nobody reads. */
static void shift_plane_backward(const float *restrict grad_out, const float *restrict in,
                                 float *restrict grad_in, const Slot *slot, int64_t height, int64_t width,
                                 float *restrict scratch, double *grad_shift) {
    if (!grad_shift && is_whole(slot)) {
        copy_plane_backward(grad_out, grad_in, slot, height, width);
        return;
    }
    int64_t right = slot->right;
    int64_t from = right > 0 ? right : 0, to = right < 0 ? width + right + 1 : width;
    if (from > width) from = width;
    if (to < from) to = from;
    float *row = scratch + 1, *zeros = row + width + 1, *unread = zeros + width;
    const float *moved = row - right;
    memset(scratch, 0, (3 * width + 2) * sizeof *scratch);
    float far_y = slot->far_down, near_y = 1 - far_y, far_x = slot->far_right, near_x = 1 - far_x;
    double down_sum = 0, right_sum = 0;
    for (int64_t y = 0; y < height; y++, grad_out += width) {
        int64_t near = y + slot->down, far = near + 1;
        int has_near = near >= 0 && near < height, has_far = far >= 0 && far < height;
        if (!has_near && !has_far) continue;
        const float *a = has_near ? in + near * width : zeros;
        const float *b = has_far ? in + far * width : zeros;
        float *grad_a = has_near ? grad_in + near * width : unread;
        float *grad_b = has_far ? grad_in + far * width : unread;
        memcpy(row, grad_out, width * sizeof *row);
        float by_row = 0, by_column = 0;
#pragma omp simd reduction(+ : by_row, by_column)
        for (int64_t x = from; x < to; x++) {
            float g_near = moved[x], g_far = moved[x - 1];
            float g = near_x * g_near + far_x * g_far;
            by_row += g * (b[x] - a[x]);
            by_column += (near_y * a[x] + far_y * b[x]) * (g_far - g_near);
            grad_a[x] += near_y * g;
            grad_b[x] += far_y * g;
        }
        down_sum += by_row;
        right_sum += by_column;
    }
    if (!grad_shift) return;
    grad_shift[0] = down_sum;
    grad_shift[1] = right_sum;
}

/* Chan's update: mean and sum of squared deviations of two sets from those of each. */
static void join_moments(double *count, double *mean, double *squares, double count_b, double mean_b,
                         double squares_b) {
    double both = *count + count_b, delta = mean_b - *mean;
    *mean += delta * count_b / both;
    *squares += squares_b + delta * delta * *count * count_b / both;
    *count = both;
}

/* Mean and biased variance of each channel over images and pixels, into mean[C] and var[C]. */
int channel_moments(const Shape *shape, const float *x, float *mean, float *var) {
    int64_t images = shape->images, channels = shape->channels;
    int64_t pixels = shape->height * shape->width;
    double *part = malloc(2 * images * channels * sizeof *part); /* (N, C) means, then squares */
    if (!part) return NO_MEMORY;
    double *squares = part + images * channels;
    int failed = 0;
    if (!shape->channels_last) {
#pragma omp parallel for num_threads(shape->threads)
        for (int64_t i = 0; i < images * channels; i++) {
            const float *plane = x + i * pixels;
            double total = 0, spread = 0;
            for (int64_t start = 0; start < pixels; start += 1024) {
                int64_t stop = start + 1024 < pixels ? start + 1024 : pixels;
                float sum = 0;
#pragma omp simd reduction(+ : sum)
                for (int64_t p = start; p < stop; p++) sum += plane[p];
                total += sum;
            }
            float centre = (float)(total / pixels);
            for (int64_t start = 0; start < pixels; start += 1024) {
                int64_t stop = start + 1024 < pixels ? start + 1024 : pixels;
                float sum = 0;
#pragma omp simd reduction(+ : sum)
                for (int64_t p = start; p < stop; p++) sum += (plane[p] - centre) * (plane[p] - centre);
                spread += sum;
            }
            part[i] = total / pixels;
            squares[i] = spread;
        }
    } else {
        int64_t block = 16384 / channels < 4 ? 4 : 16384 / channels; /* pixels that stay in cache */
#pragma omp parallel num_threads(shape->threads)
        {
            float *sum = malloc(2 * channels * sizeof *sum);
            if (!sum) failed = NO_MEMORY;
#pragma omp for
            for (int64_t n = 0; n < images; n++) {
                if (!sum) continue;
                float *spread = sum + channels;
                double *mean_n = part + n * channels, *squares_n = squares + n * channels;
                for (int64_t start = 0; start < pixels; start += block) {
                    int64_t stop = start + block < pixels ? start + block : pixels;
                    const float *rows = x + (n * pixels + start) * channels;
                    memset(sum, 0, 2 * channels * sizeof *sum);
                    for (int64_t p = 0; p < stop - start; p++)
                        for (int64_t c = 0; c < channels; c++) sum[c] += rows[p * channels + c];
                    for (int64_t c = 0; c < channels; c++) sum[c] /= (float)(stop - start);
                    for (int64_t p = 0; p < stop - start; p++)
                        for (int64_t c = 0; c < channels; c++) {
                            float d = rows[p * channels + c] - sum[c];
                            spread[c] += d * d;
                        }
                    for (int64_t c = 0; c < channels; c++) {
                        double count = (double)start;
                        if (start == 0) {
                            mean_n[c] = sum[c];
                            squares_n[c] = spread[c];
                        } else
                            join_moments(&count, &mean_n[c], &squares_n[c], (double)(stop - start),
                                         sum[c], spread[c]);
                    }
                }
            }
            free(sum);
        }
    }
    for (int64_t c = 0; c < channels && !failed; c++) {
        double count = (double)pixels, m = part[c], s = squares[c];
        for (int64_t n = 1; n < images; n++)
            join_moments(&count, &m, &s, (double)pixels, part[n * channels + c],
                         squares[n * channels + c]);
        mean[c] = (float)m;
        var[c] = (float)(s / count);
    }
    free(part);
    return failed;
}

static void forward_planes(const Shape *shape, const float *x, const float *scale, const float *offset,
                           const Slot *slots, float *y, int *failed) {
    int64_t pixels = shape->height * shape->width;
#pragma omp parallel num_threads(shape->threads)
    {
        float *plane = malloc((pixels + SCRATCH(shape)) * sizeof *plane);
        if (!plane) *failed = NO_MEMORY;
#pragma omp for
        for (int64_t i = 0; i < shape->images * shape->slots; i++) {
            if (!plane) continue;
            const Slot *slot = &slots[i % shape->slots];
            int64_t c = slot->channel;
            const float *in = x + (i / shape->slots * shape->channels + c) * pixels;
            float *out = y + i * pixels, *active = slot->is_shifted ? plane : out;
            if (scale) {
                activate_plane(in, active, pixels, scale[c], offset[c]);
                in = active;
            }
            if (slot->is_shifted)
                shift_plane(in, out, slot, shape->height, shape->width, plane + pixels);
            else if (in != out)
                memcpy(out, in, pixels * sizeof *out);
        }
        free(plane);
    }
}

/* Planes a power of two apart would share the same few lines of the cache. */
#define PLANE_GAP 16

/* Channels last: what is done pixel by pixel, and what plane by plane. */
typedef struct {
    int64_t copies, moved, planes;
    int32_t *copy_to, *copy_from; /* slots that are not shifted: place in y, channel of x */
    int32_t *move_to;             /* shifted slots: place in y */
    int32_t *plane_of;            /* shifted slots: which of the distinct sources it reads */
    int32_t *channel_of;          /* distinct sources: channel of x */
    int is_whole;                 /* y has a slot for every channel, most of which read their own */
} Routes;

static int plan_routes(Routes *routes, const Shape *shape, const Slot *slots) {
    int64_t open = shape->slots, channels = shape->channels;
    int32_t *space = malloc((5 * open + channels + 1) * sizeof *space);
    if (!space) return NO_MEMORY;
    memset(routes, 0, sizeof *routes);
    routes->copy_to = space;
    routes->copy_from = space + open;
    routes->move_to = space + 2 * open;
    routes->plane_of = space + 3 * open;
    routes->channel_of = space + 4 * open;
    int32_t *number = space + 5 * open;
    routes->is_whole = open == channels;
    for (int64_t c = 0; c < channels; c++) number[c] = -1;
    for (int64_t s = 0; s < open; s++) {
        int32_t c = (int32_t)slots[s].channel;
        if (!slots[s].is_shifted) {
            if (routes->is_whole && c == s) continue; /* done for the whole row at once */
            routes->copy_to[routes->copies] = (int32_t)s;
            routes->copy_from[routes->copies++] = c;
            continue;
        }
        if (number[c] < 0) {
            routes->channel_of[routes->planes] = c;
            number[c] = (int32_t)routes->planes++;
        }
        routes->move_to[routes->moved] = (int32_t)s;
        routes->plane_of[routes->moved++] = number[c];
    }
    return 0;
}

static void activate_row(const float *restrict x, float *restrict y, int64_t channels,
                         const float *restrict scale, const float *restrict offset) {
    for (int64_t c = 0; c < channels; c++) y[c] = activate(x[c], scale[c], offset[c]);
}

/* Distinct sources of shifted slots as planes, a block of pixels at a time so that rows stay in cache. */
static void gather_planes(const float *restrict x, int64_t channels, int64_t pixels, const float *scale,
                          const float *offset, const Routes *routes, float *restrict out, int64_t step) {
    for (int64_t start = 0; start < pixels; start += 64) {
        int64_t stop = start + 64 < pixels ? start + 64 : pixels;
        for (int64_t k = 0; k < routes->planes; k++) {
            int64_t c = routes->channel_of[k];
            if (scale)
                for (int64_t p = start; p < stop; p++)
                    out[k * step + p] = activate(x[p * channels + c], scale[c], offset[c]);
            else
                for (int64_t p = start; p < stop; p++) out[k * step + p] = x[p * channels + c];
        }
    }
}

static void forward_last(const Shape *shape, const float *x, const float *scale, const float *offset,
                         const Slot *slots, float *y, int *failed) {
    int64_t channels = shape->channels, open = shape->slots, pixels = shape->height * shape->width;
    int64_t step = pixels + PLANE_GAP;
    Routes routes;
    if (plan_routes(&routes, shape, slots)) {
        *failed = NO_MEMORY;
        return;
    }
#pragma omp parallel num_threads(shape->threads)
    {
        int64_t wanted = (routes.planes + routes.moved) * step + channels + SCRATCH(shape);
        float *sources = malloc(wanted * sizeof *sources);
        if (!sources) *failed = NO_MEMORY;
#pragma omp for
        for (int64_t n = 0; n < shape->images; n++) {
            if (!sources) continue;
            float *shifted = sources + routes.planes * step;
            float *activated = shifted + routes.moved * step, *scratch = activated + channels;
            const float *in = x + n * pixels * channels;
            gather_planes(in, channels, pixels, scale, offset, &routes, sources, step);
            for (int64_t m = 0; m < routes.moved; m++)
                shift_plane(sources + routes.plane_of[m] * step, shifted + m * step,
                            &slots[routes.move_to[m]], shape->height, shape->width, scratch);
            for (int64_t p = 0; p < pixels; p++) {
                const float *from = in + p * channels;
                float *to = y + (n * pixels + p) * open;
                if (scale) {
                    float *active = routes.is_whole && routes.copies == 0 ? to : activated;
                    activate_row(from, active, channels, scale, offset);
                    from = active;
                }
                if (routes.is_whole && from != to) memcpy(to, from, channels * sizeof *to);
                for (int64_t i = 0; i < routes.copies; i++)
                    to[routes.copy_to[i]] = from[routes.copy_from[i]];
                for (int64_t m = 0; m < routes.moved; m++)
                    to[routes.move_to[m]] = shifted[m * step + p];
            }
        }
        free(sources);
    }
    free(routes.copy_to);
}

/* y (N, slots, H, W) from x (N, C, H, W); scale and offset NULL: no batch norm and no ReLU. */
int select_forward(const Shape *shape, const float *x, const float *scale, const float *offset, float *y) {
    int failed;
    Slot *slots = read_slots(shape, &failed);
    if (slots && shape->channels_last)
        forward_last(shape, x, scale, offset, slots, y, &failed);
    else if (slots)
        forward_planes(shape, x, scale, offset, slots, y, &failed);
    free(slots);
    return failed;
}

/* Through the ReLU, and the two sums that batch norm's backward needs; `grad` may be `out`. */
static void mask_plane(const float *x, const float *grad, float *out, int64_t size, float scale,
                       float offset, float mean, double *sums) {
    for (int64_t start = 0; start < size; start += 1024) {
        int64_t stop = start + 1024 < size ? start + 1024 : size;
        float plain = 0, centred = 0;
#pragma omp simd reduction(+ : plain, centred)
        for (int64_t i = start; i < stop; i++) {
            float g = scale * x[i] + offset <= 0 ? 0 : grad[i];
            out[i] = g;
            plain += g;
            centred += g * (x[i] - mean);
        }
        sums[0] += plain;
        sums[1] += centred;
    }
}

/* Gradients that all images share are summed image by image: `sums` is (N, C, 2), `grad_shift`
 * (N, slots, 2); the caller adds them up in the order of the images. */
static void backward_planes(const Shape *shape, const float *x, const float *scale, const float *offset,
                            const float *mean, const Slot *slots, const float *grad_y,
                            float *grad_x, double *sums, double *grad_shift, int *failed) {
    int64_t channels = shape->channels, open = shape->slots, pixels = shape->height * shape->width;
    int64_t *first = calloc(channels + 1 + open, sizeof *first); /* readers of each channel */
    if (!first) {
        *failed = NO_MEMORY;
        return;
    }
    int64_t *readers = first + channels + 1;
    for (int64_t s = 0; s < open; s++) first[slots[s].channel + 1]++;
    for (int64_t c = 0; c < channels; c++) first[c + 1] += first[c];
    for (int64_t s = open - 1; s >= 0; s--) readers[--first[slots[s].channel + 1]] = s;
    for (int64_t c = 0; c < channels; c++) first[c] = first[c + 1];
    first[channels] = open;
#pragma omp parallel num_threads(shape->threads)
    {
        float *plane = malloc((pixels + SCRATCH(shape)) * sizeof *plane);
        if (!plane) *failed = NO_MEMORY;
#pragma omp for
        for (int64_t i = 0; i < shape->images * channels; i++) {
            if (!plane) continue;
            int64_t n = i / channels, c = i % channels;
            const float *in = x + i * pixels;
            float *out = grad_x + i * pixels;
            const float *grad = out;
            int64_t start = first[c], stop = first[c + 1];
            int is_active = 0; /* `plane` holds the activated channel */
            if (stop - start == 1 && !slots[readers[start]].is_shifted)
                grad = grad_y + (n * open + readers[start]) * pixels; /* no copy */
            else {
                memset(out, 0, pixels * sizeof *out);
                for (int64_t r = start; r < stop; r++) {
                    int64_t s = readers[r];
                    const float *from = grad_y + (n * open + s) * pixels;
                    if (!slots[s].is_shifted) {
                        for (int64_t p = 0; p < pixels; p++) out[p] += from[p];
                        continue;
                    }
                    if (scale && grad_shift && !is_active)
                        activate_plane(in, plane, pixels, scale[c], offset[c]);
                    is_active = scale && grad_shift;
                    shift_plane_backward(from, is_active ? plane : in, out, &slots[s], shape->height,
                                         shape->width, plane + pixels,
                                         grad_shift ? grad_shift + 2 * (n * open + s) : NULL);
                }
            }
            if (scale)
                mask_plane(in, grad, out, pixels, scale[c], offset[c], mean[c], sums + 2 * i);
            else if (grad != out)
                memcpy(out, grad, pixels * sizeof *out);
        }
        free(plane);
    }
    free(first);
}

static void mask_row(const float *restrict x, float *restrict grad, int64_t channels,
                     const float *restrict scale, const float *restrict offset,
                     const float *restrict mean, float *restrict plain,
                     float *restrict centred) {
    for (int64_t c = 0; c < channels; c++) {
        float g = scale[c] * x[c] + offset[c] <= 0 ? 0 : grad[c];
        grad[c] = g;
        plain[c] += g;
        centred[c] += g * (x[c] - mean[c]);
    }
}

static void backward_last(const Shape *shape, const float *x, const float *scale, const float *offset,
                          const float *mean, const Slot *slots, const float *grad_y,
                          float *grad_x, double *sums, double *grad_shift, int *failed) {
    int64_t channels = shape->channels, open = shape->slots;
    int64_t height = shape->height, width = shape->width, pixels = height * width;
    int64_t step = pixels + PLANE_GAP;
    Routes routes;
    if (plan_routes(&routes, shape, slots)) {
        *failed = NO_MEMORY;
        return;
    }
#pragma omp parallel num_threads(shape->threads)
    {
        int64_t wanted = (2 * routes.planes + routes.moved) * step + 2 * channels + SCRATCH(shape);
        float *sources = malloc(wanted * sizeof *sources);
        if (!sources) *failed = NO_MEMORY;
#pragma omp for
        for (int64_t n = 0; n < shape->images; n++) {
            if (!sources) continue;
            float *grad_sources = sources + routes.planes * step;
            float *grad_moved = grad_sources + routes.planes * step;
            float *partial = grad_moved + routes.moved * step, *scratch = partial + 2 * channels;
            const float *in = x + n * pixels * channels, *grad = grad_y + n * pixels * open;
            float *out = grad_x + n * pixels * channels;
            double *sums_n = sums + 2 * n * channels;
            if (grad_shift) gather_planes(in, channels, pixels, scale, offset, &routes, sources, step);
            memset(grad_sources, 0, routes.planes * step * sizeof *grad_sources);
            for (int64_t p = 0; p < pixels; p++)
                for (int64_t m = 0; m < routes.moved; m++)
                    grad_moved[m * step + p] = grad[p * open + routes.move_to[m]];
            for (int64_t m = 0; m < routes.moved; m++) {
                int64_t s = routes.move_to[m], k = routes.plane_of[m];
                shift_plane_backward(grad_moved + m * step, sources + k * step, grad_sources + k * step,
                                     &slots[s], height, width, scratch,
                                     grad_shift ? grad_shift + 2 * (n * open + s) : NULL);
            }
            for (int64_t y = 0; y < height; y++) {
                memset(partial, 0, 2 * channels * sizeof *partial);
                for (int64_t p = y * width; p < (y + 1) * width; p++) {
                    const float *from = grad + p * open;
                    float *to = out + p * channels;
                    if (routes.is_whole) {
                        memcpy(to, from, channels * sizeof *to);
                        /* These slots read other channels than their own. */
                        for (int64_t i = 0; i < routes.copies; i++) to[routes.copy_to[i]] = 0;
                        for (int64_t m = 0; m < routes.moved; m++) to[routes.move_to[m]] = 0;
                    } else
                        memset(to, 0, channels * sizeof *to);
                    for (int64_t i = 0; i < routes.copies; i++)
                        to[routes.copy_from[i]] += from[routes.copy_to[i]];
                    for (int64_t k = 0; k < routes.planes; k++)
                        to[routes.channel_of[k]] += grad_sources[k * step + p];
                }
                /* In a loop of its own: a vector load right behind a store to a part of it stalls. */
                for (int64_t p = y * width; scale && p < (y + 1) * width; p++)
                    mask_row(in + p * channels, out + p * channels, channels, scale, offset, mean,
                             partial, partial + channels);
                for (int64_t c = 0; scale && c < channels; c++) {
                    sums_n[2 * c] += partial[c];
                    sums_n[2 * c + 1] += partial[channels + c];
                }
            }
        }
        free(sources);
    }
    free(routes.copy_to);
}

/* The gradient in x, and what batch norm and the shift need:
 *   sums (C, 2): of the gradient behind the ReLU, alone and times (x - mean), over images and pixels;
 *   grad_shift (slots, axes): zero where no shift applies.
 * With batch norm, grad_x is that gradient, not yet passed through the norm: norm_backward does that. */
int select_backward(const Shape *shape, const float *x, const float *scale, const float *offset,
                    const float *mean, const float *grad_y, float *grad_x, float *sums, float *grad_shift) {
    int64_t images = shape->images, channels = shape->channels, open = shape->slots;
    int failed;
    Slot *slots = read_slots(shape, &failed);
    if (!slots) return failed;
    int64_t num_sums = scale ? 2 * images * channels : 0;
    double *by_image = calloc(num_sums + 2 * images * open + 1, sizeof *by_image);
    if (!by_image) {
        free(slots);
        return NO_MEMORY;
    }
    double *shift_by_image = grad_shift ? by_image + num_sums : NULL;
    if (shape->channels_last)
        backward_last(shape, x, scale, offset, mean, slots, grad_y, grad_x, by_image, shift_by_image, &failed);
    else
        backward_planes(shape, x, scale, offset, mean, slots, grad_y, grad_x, by_image, shift_by_image,
                        &failed);
    for (int64_t c = 0; scale && c < 2 * channels; c++) {
        double total = 0;
        for (int64_t n = 0; n < images; n++) total += by_image[2 * n * channels + c];
        sums[c] = (float)total;
    }
    if (grad_shift) {
        memset(grad_shift, 0, open * shape->axes * sizeof *grad_shift);
        for (int64_t s = 0; s < open; s++) {
            if (!slots[s].is_shifted) continue;
            double total[2] = {0, 0};
            for (int64_t n = 0; n < images; n++) {
                total[0] += shift_by_image[2 * (n * open + s)];
                total[1] += shift_by_image[2 * (n * open + s) + 1];
            }
            float *to = grad_shift + s * shape->axes;
            if (shape->axes == 2) to[0] = (float)total[0];
            to[shape->axes - 1] = (float)total[1];
        }
    }
    free(by_image);
    free(slots);
    return failed;
}

/* grad_x[c] = scale[c] * (grad_x[c] - lift[c] - tilt[c] * (x[c] - mean[c])), in place. */
int norm_backward(const Shape *shape, const float *x, const float *scale, const float *mean,
                   const float *lift, const float *tilt, float *grad_x) {
    int64_t channels = shape->channels, pixels = shape->height * shape->width;
    if (!shape->channels_last) {
#pragma omp parallel for num_threads(shape->threads)
        for (int64_t i = 0; i < shape->images * channels; i++) {
            int64_t c = i % channels;
            const float *restrict in = x + i * pixels;
            float *restrict out = grad_x + i * pixels;
            float a = scale[c], m = mean[c], k = lift[c], t = tilt[c];
            for (int64_t p = 0; p < pixels; p++) out[p] = a * (out[p] - k - t * (in[p] - m));
        }
    } else {
#pragma omp parallel for num_threads(shape->threads)
        for (int64_t i = 0; i < shape->images * pixels; i++) {
            const float *restrict in = x + i * channels;
            float *restrict out = grad_x + i * channels;
            for (int64_t c = 0; c < channels; c++)
                out[c] = scale[c] * (out[c] - lift[c] - tilt[c] * (in[c] - mean[c]));
        }
    }
    return 0;
}
