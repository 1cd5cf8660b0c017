//! Stored layouts of weights against values worked out by hand, and their limits.

use gemma4_format::encoding::{QuantizedBytes, ZeroType, decode_row};
use gemma4_format::{DType, Encoding, Offset};
use half::{bf16, f16};
use proptest::prelude::*;

fn quantized(bits: u8, group: u32, scale: DType, offset: Offset) -> Encoding {
    Encoding::Quantized { bits, group, scale, offset }
}

fn bf16s(values: &[f32]) -> Vec<u8> {
    values.iter().flat_map(|v| bf16::from_f32(*v).to_le_bytes()).collect()
}

#[test]
fn int4_with_nibble_zeros() {
    let encoding = quantized(4, 2, DType::BF16, Offset::Zero(ZeroType::Nibble));
    // One row of 6: codes 1 2 | 3 15 | 0 7, scales 0.5, 2, 1, zeros 1, 15, 8.
    let bytes = QuantizedBytes {
        codes: &[0x21, 0xf3, 0x70],
        codes_high: &[],
        scales: &bf16s(&[0.5, 2.0, 1.0]),
        offsets: &[0xf1, 0x08],
    };
    let mut row = [0.0; 6];
    decode_row(encoding, bytes, 0, &mut row);
    assert_eq!(row, [0.0, 0.5, -24.0, 0.0, -8.0, -1.0]);
}

#[test]
fn int6_takes_its_high_bits_from_the_second_plane() {
    let encoding = quantized(6, 4, DType::F32, Offset::Symmetric);
    // Codes 0, 63, 32, 17: low nibbles 0 f 0 1, high pairs 0 3 2 1.
    let bytes = QuantizedBytes {
        codes: &[0xf0, 0x10],
        codes_high: &[0b01_10_11_00],
        scales: &1.0f32.to_le_bytes(),
        offsets: &[],
    };
    let mut row = [0.0; 4];
    decode_row(encoding, bytes, 0, &mut row);
    assert_eq!(row, [-32.0, 31.0, 0.0, -15.0]);
}

#[test]
fn int5_high_bits_are_one_per_code() {
    let encoding = quantized(5, 8, DType::F16, Offset::Minimum(DType::F16));
    let scale = f16::from_f32(0.25).to_le_bytes();
    let minimum = f16::from_f32(-2.0).to_le_bytes();
    let bytes = QuantizedBytes {
        codes: &[0x10, 0x32, 0x54, 0x76],
        codes_high: &[0b1000_0001],
        scales: &scale,
        offsets: &minimum,
    };
    let mut row = [0.0; 8];
    decode_row(encoding, bytes, 0, &mut row);
    let codes = [16.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 23.0];
    assert_eq!(row, codes.map(|q| q * 0.25 - 2.0));
}

#[test]
fn int8_rows_are_symmetric_around_128() {
    let encoding = quantized(8, 3, DType::BF16, Offset::Symmetric);
    let bytes = QuantizedBytes {
        codes: &[0, 128, 255, 1, 2, 3],
        codes_high: &[],
        scales: &bf16s(&[0.5, 1.0]),
        offsets: &[],
    };
    let mut row = [0.0; 3];
    decode_row(encoding, bytes, 0, &mut row);
    assert_eq!(row, [-64.0, 0.0, 63.5]);
    decode_row(encoding, bytes, 1, &mut row);
    assert_eq!(row, [-127.0, -126.0, -125.0]);
}

#[test]
fn bits_per_weight_are_those_of_the_table() {
    let dims = [5376, 5376];
    let of = |offset| quantized(4, 32, DType::BF16, offset).bits_per_weight(&dims).unwrap();
    assert_eq!(of(Offset::Zero(ZeroType::Nibble)), 4.625);
    assert_eq!(of(Offset::Zero(ZeroType::U8)), 4.75);
    assert_eq!(of(Offset::Zero(ZeroType::BF16)), 5.0);
}

fn any_encoding() -> impl Strategy<Value = Encoding> {
    let dtype =
        || prop_oneof![Just(DType::F32), Just(DType::F16), Just(DType::BF16), Just(DType::U8)];
    let zero = prop_oneof![
        Just(ZeroType::Nibble),
        Just(ZeroType::U8),
        Just(ZeroType::F16),
        Just(ZeroType::BF16)
    ];
    let offset = prop_oneof![
        Just(Offset::Symmetric),
        zero.prop_map(Offset::Zero),
        dtype().prop_map(Offset::Minimum)
    ];
    prop_oneof![
        dtype().prop_map(Encoding::Dense),
        (any::<u8>(), any::<u32>(), dtype(), offset)
            .prop_map(|(bits, group, scale, offset)| quantized(bits, group, scale, offset)),
        (3u8..9, 0u32..65, dtype(), Just(Offset::Symmetric))
            .prop_map(|(bits, group, scale, offset)| quantized(bits, group, scale, offset)),
    ]
}

proptest! {
    /// Whatever a file claims, laying it out is an answer or an error.
    #[test]
    fn parts_are_total(encoding in any_encoding(), dims in prop::collection::vec(any::<u32>(), 0..6)) {
        let _ = encoding.parts("w", &dims);
        prop_assert!(!encoding.describe().is_empty());
    }

    /// What lays out also decodes, within the bytes that it claims.
    #[test]
    fn accepted_encodings_decode(encoding in any_encoding(), n in 1u32..4, k in 1u32..130) {
        let Ok(parts) = encoding.parts("w", &[n, k]) else { return Ok(()) };
        let bytes: Vec<Vec<u8>> = parts.iter().map(|p| vec![0x5a; p.bytes() as usize]).collect();
        let views: Vec<&[u8]> = bytes.iter().map(Vec::as_slice).collect();
        if let Some(view) = QuantizedBytes::from_parts(encoding, &views) {
            let mut row = vec![0.0; k as usize];
            for i in 0..n {
                decode_row(encoding, view, i as usize, &mut row);
            }
        }
    }

    /// Codes, scales and offsets that are packed bit by bit come back as the table says.
    #[test]
    fn what_is_packed_bit_by_bit_decodes_to_the_formula(
        bits in prop_oneof![Just(4u8), Just(5), Just(6), Just(8)],
        kind in 0usize..6,
        groups in 1usize..5,
        group in prop_oneof![Just(1usize), Just(2), Just(3), Just(16), Just(32)],
        rows in 1usize..4,
        seed in any::<u64>(),
    ) {
        let nibble = if bits == 4 { ZeroType::Nibble } else { ZeroType::U8 };
        let offset = [
            Offset::Symmetric,
            Offset::Minimum(DType::F32),
            Offset::Zero(nibble),
            Offset::Zero(ZeroType::U8),
            Offset::Zero(ZeroType::F16),
            Offset::Zero(ZeroType::BF16),
        ][kind];
        let (encoding, k) = (quantized(bits, group as u32, DType::F32, offset), group * groups);
        let mut state = seed;
        let mut random = |n: u32| {
            state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            (state >> 33) as u32 % n
        };
        let codes: Vec<u32> = (0..rows * k).map(|_| random(1 << bits)).collect();
        let scales: Vec<f32> = (0..rows * groups).map(|_| random(1000) as f32 / 64.0).collect();
        // Whole numbers below 16 are exact in every type.
        let offsets: Vec<f32> = (0..rows * groups).map(|_| random(16) as f32).collect();
        let store = |values: &[f32], dtype: DType| -> Vec<u8> {
            let bytes = |x: &f32| match dtype {
                DType::F32 => x.to_le_bytes().to_vec(),
                DType::F16 => f16::from_f32(*x).to_le_bytes().to_vec(),
                DType::BF16 => bf16::from_f32(*x).to_le_bytes().to_vec(),
                DType::U8 => vec![*x as u8],
            };
            values.iter().flat_map(bytes).collect()
        };
        // Each row begins on a byte; fields of a row follow one another from the lowest bit on.
        let pack = |fields: &[u32], columns: usize, width: usize| -> Vec<u8> {
            let row = |fields: &[u32]| {
                let mut bytes = vec![0u8; (columns * width).div_ceil(8)];
                for (at, bit) in (0..columns * width).map(|at| (at, fields[at / width] >> (at % width) & 1)) {
                    bytes[at / 8] |= (bit as u8) << (at % 8);
                }
                bytes
            };
            fields.chunks(columns).flat_map(row).collect()
        };
        let low: Vec<u32> = codes.iter().map(|code| code & 15).collect();
        let high: Vec<u32> = codes.iter().map(|code| code >> 4).collect();
        let mut parts = match bits {
            8 => vec![pack(&codes, k, 8)],
            4 => vec![pack(&low, k, 4)],
            _ => vec![pack(&low, k, 4), pack(&high, k, usize::from(bits) - 4)],
        };
        parts.push(store(&scales, DType::F32));
        match offset {
            Offset::Symmetric => {}
            Offset::Zero(ZeroType::Nibble) => {
                let zeros: Vec<u32> = offsets.iter().map(|zero| *zero as u32).collect();
                parts.push(pack(&zeros, groups, 4));
            }
            Offset::Zero(ZeroType::U8) => parts.push(store(&offsets, DType::U8)),
            Offset::Zero(ZeroType::F16) => parts.push(store(&offsets, DType::F16)),
            Offset::Zero(ZeroType::BF16) => parts.push(store(&offsets, DType::BF16)),
            Offset::Minimum(dtype) => parts.push(store(&offsets, dtype)),
        }
        let claimed = encoding.parts("w", &[rows as u32, k as u32]).unwrap();
        let lengths: Vec<u64> = claimed.iter().map(|part| part.bytes()).collect();
        prop_assert_eq!(lengths, parts.iter().map(|part| part.len() as u64).collect::<Vec<_>>());
        let views: Vec<&[u8]> = parts.iter().map(Vec::as_slice).collect();
        let view = QuantizedBytes::from_parts(encoding, &views).unwrap();
        for row in 0..rows {
            let mut found = vec![0.0; k];
            decode_row(encoding, view, row, &mut found);
            for (column, found) in found.iter().enumerate() {
                let at = row * groups + column / group;
                let (q, s, o) = (codes[row * k + column] as f32, scales[at], offsets[at]);
                let wanted = match offset {
                    Offset::Symmetric => (q - f32::from(1u16 << (bits - 1))) * s,
                    Offset::Zero(_) => (q - o) * s,
                    Offset::Minimum(_) => q * s + o,
                };
                prop_assert_eq!(found.to_bits(), wanted.to_bits());
            }
        }
    }
}
