/* Columns [first, last) of a product, in whole vectors; compiled once a set of instructions, see cpu.c.

   ROWS rows are multiplied with VECTORS vectors of columns at a time: so many sums stay in registers over the inner pairs. */

FN void NAME(put)(const struct product *p, int64_t row, int64_t column, __m512 sum) {
    if (p->bias) {
        const __m256i bias = _mm256_loadu_si256((const void *)(p->bias + column));
        sum = _mm512_add_ps(sum, _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bias), 16)));
    }
    const __m512i bits = _mm512_castps_si512(sum), tie = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    __m512i rounded = _mm512_srli_epi32(_mm512_add_epi32(_mm512_add_epi32(bits, tie), _mm512_set1_epi32(0x7fff)), 16);
    rounded = _mm512_mask_mov_epi32(rounded, _mm512_cmp_ps_mask(sum, sum, _CMP_UNORD_Q), _mm512_set1_epi32(0x7fc0));
    _mm256_storeu_si256((void *)(p->out + row * p->columns + column), _mm512_cvtepi32_epi16(rounded));
}

/* `ahead`: weights that come later, of which it fetches `step` bytes for each inner pair. OWN: it fetches its own ahead; a
   loop without a turn would cost all others some time. */
FN void NAME(tile)(const struct product *p, int64_t row, int64_t column, const char *ahead, int64_t step, const int ROWS,
                   const int VECTORS, const int OWN) {
    const char *fetched = ahead;
    const int64_t own = 4 * p->block;
    const uint16_t *weight = p->weight + column / p->block * p->block_numbers + column % p->block * 2;
    const uint16_t *x = p->x + row * p->x_stride;
    const int64_t pairs = p->inner / 2;
    __m512 sum[4][4];
    for (int r = 0; r < ROWS; r++)
        for (int v = 0; v < VECTORS; v++) sum[r][v] = _mm512_setzero_ps();
    for (int64_t i = 0; i < pairs; i++, weight += 2 * p->block) {
        for (ahead += step; fetched < ahead; fetched += 64) __builtin_prefetch(fetched, 0, 2);
        if (OWN)
            for (const char *next = (const char *)weight + fetched_ahead, *end = next + own; next < end; next += 64)
                __builtin_prefetch(next);
        __m512i here[4];
        for (int v = 0; v < VECTORS; v++) here[v] = _mm512_loadu_si512(weight + 32 * v);
        for (int r = 0; r < ROWS; r++) {
            int32_t pair;
            memcpy(&pair, x + r * p->x_stride + 2 * i, sizeof pair);
            for (int v = 0; v < VECTORS; v++) sum[r][v] = NAME(add_pairs)(sum[r][v], here[v], pair);
        }
    }
    for (int r = 0; r < ROWS; r++)
        for (int v = 0; v < VECTORS; v++) NAME(put)(p, row + r, column + 16 * v, sum[r][v]);
}

/* Those rows that are no whole tile. */
FN void NAME(few_rows)(
    const struct product *p, int64_t row, int64_t column, const char *ahead, int64_t step, const int VECTORS, const int OWN) {
    switch (p->rows - row) {
    case 3: NAME(tile)(p, row, column, ahead, step, 3, VECTORS, OWN); break;
    case 2: NAME(tile)(p, row, column, ahead, step, 2, VECTORS, OWN); break;
    case 1: NAME(tile)(p, row, column, ahead, step, 1, VECTORS, OWN); break;
    }
}

/* All rows, without a next block to fetch. */
FN void NAME(rows_alone)(const struct product *p, int64_t column, const int VECTORS, const int OWN) {
    int64_t row = 0;
    for (; row + 4 <= p->rows; row += 4) NAME(tile)(p, row, column, NULL, 0, 4, VECTORS, OWN);
    NAME(few_rows)(p, row, column, NULL, 0, VECTORS, OWN);
}

/* Many rows pass a block several times: meanwhile the next one is fetched, in equal parts. Of two passes the first waits for
   memory anyway. */
FN void NAME(rows)(const struct product *p, int64_t column, int64_t last, const int VECTORS) {
    const int64_t next = (column / p->block + 1) * p->block, groups = (p->rows + 3) / 4;
    const int64_t step = groups > 2 && next < last ? 4 * p->block / groups : 0, part = step * (p->inner / 2);
    const char *ahead = (const char *)(p->weight + next / p->block * p->block_numbers);
    int64_t row = 0;
    if (!step) {
        if (fetched_ahead) NAME(rows_alone)(p, column, VECTORS, 1);
        else NAME(rows_alone)(p, column, VECTORS, 0);
        return;
    }
    for (; row + 4 <= p->rows; row += 4, ahead += part) NAME(tile)(p, row, column, ahead, step, 4, VECTORS, 0);
    NAME(few_rows)(p, row, column, ahead, step, VECTORS, 0);
}

ENTRY void NAME(columns)(const struct product *p, int64_t first, int64_t last) {
    while (first < last) {
        const int64_t of_block = p->block - first % p->block, left = last - first;
        const int64_t vectors = (of_block < left ? of_block : left) / 16;
        switch (vectors < 4 ? vectors : 4) {
        case 1: NAME(rows)(p, first, last, 1), first += 16; break;
        case 2: NAME(rows)(p, first, last, 2), first += 2 * 16; break;
        case 3: NAME(rows)(p, first, last, 3), first += 3 * 16; break;
        default: NAME(rows)(p, first, last, 4), first += 4 * 16;
        }
    }
}
