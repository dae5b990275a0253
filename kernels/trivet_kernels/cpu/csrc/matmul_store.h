/* Storing the sums of a product. */
#ifndef TRIVET_MATMUL_STORE_H
#define TRIVET_MATMUL_STORE_H

#include "block.h"
#include "matmul.h"

/* What is stored: the sums, or with a gate, activation(gate) * up as elementwise_gate.c has them. */
typedef struct {
    char *values; /* [rows][stride] of `dtype` */
    int64_t stride;
    int dtype;
    int gate;
} Output;

/* Add the bias to `sums` [rows * planes][PANEL] of panel `stripe`, and store them as rows `row` and following of the
 * output. With a gate, `up` has the sums of the panel that is as far into the second half of the matrix; what is stored
 * is then activation(sums) * up, both rounded to the output's type beforehand. */
typedef void (*store_function)(const QuantLinear *layer, const float *sums, const float *up, int64_t row, int64_t rows,
                               int64_t stripe, const Output *out);

/* The one for the output's gate and type. */
store_function storing(const Output *out);

#endif
