"""Data of layers with a recurrent state: the sizes of a state kind, its records, and the plan of a step.

Dimensions, in addition to those of `quire.ops.spec`:

| letter | is | letter | is |
|---|---|---|---|
| Hk, Hv | key heads, heads of the state | C | tokens of a piece (chunk): 32 |
| Dk, Dv | numbers of a key, of a value | W, K | channels and taps of the convolution |
| Ns, Nr | state records, row records | P | pieces in the widest table of records |

A sequence is cut into pieces at absolute multiples of C tokens. The result of the row at position c·C + t depends only
on the state S at the beginning of piece c and on the rows 0..t of that piece:

    gated delta rule    u_t = beta_t · (v_t − e^{G_t} · Sᵀk_t − Σ_{j<t} e^{G_t − G_j} · (k_j·k_t) · u_j)
    Mamba-2             u_t = dt_t · x_t
    both                o_t = e^{G_t} · Sᵀq_t + Σ_{j≤t} e^{G_t − G_j} · (k_j·q_t) · u_j
    after the piece     S' = e^{G_31} · S + Σ_j (e^{G_31 − G_j} · k_j) u_jᵀ

G_t is the sum of the log-decays g_0 + … + g_t. All sums have one order (j ascending) and are in fp32 (float64 for
float64), so a row has the same bits alone, in a prefill chunk, and with its whole prompt. The convolution's row p reads
the inputs p − K + 1 .. p, where those before the sequence's start are zeros.

A scan has a decay for each element of a state, which such sums of a piece cannot express. It goes from row to row:

    S_t = e^{g_t} ⊙ S_{t-1} + k_t u_tᵀ,    o_t = S_tᵀ q_t

    "delta" (KDA)           g_t depends on the element of the key, u_t = beta_t · (v_t − (e^{g_t} ⊙ S_{t-1})ᵀ k_t)
    "selective" (Mamba-1)   g_t = rate · dt_t, where rate [Dk, Dv] is constant and dt_t [Dv], u_t = dt_t · v_t
    "lru" (RG-LRU)          as that, Dk = 1, k_t = q_t = 1, u_t = sqrt(1 − e^{2 g_t}) · i_t · v_t, but u_0 = i_0 · v_0

It starts at the last multiple of C tokens and adds the recorded rows after it, so a row has the same bits in every cut.

With n tokens computed, a sequence keeps the state record of piece n // C (piece 0 needs no record). If n is not a
multiple of C it also keeps the row record of that piece: the keys, updates, summed log-decays and convolution inputs of
its rows. A state is written once, when a step reaches the end of a piece, and never changes. Rows may be overwritten,
for example those of rejected draft tokens. Records that no sequence owns may have any value, NaN included.
"""
