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
}
