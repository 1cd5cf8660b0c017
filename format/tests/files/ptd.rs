//! The data file: layout, what the safetensors library makes of it, and what is refused.

use super::common;

use gemma4_format::ptd::{DATA_ALIGNMENT, Description, Header, Layout, TENSOR_ALIGNMENT};
use gemma4_format::{Error, Result};

/// A file of this layout in which byte `i` of every tensor is `i`.
fn file(layout: &Layout) -> Vec<u8> {
    let mut bytes = layout.header.clone();
    bytes.resize(layout.length as usize, 0);
    for (part, offset) in layout.weights.iter().flatten() {
        for i in 0..part.bytes() {
            bytes[(offset + i) as usize] = i as u8;
        }
    }
    bytes
}

fn parse(bytes: &[u8]) -> Result<Header> {
    let first: [u8; 8] = bytes[..8].try_into().unwrap();
    let size = Header::size(bytes.len() as u64, first)?;
    Header::parse(&bytes[..size as usize], bytes.len() as u64)
}

#[test]
fn it_is_an_aligned_safetensors_file() {
    let layout = Layout::new(&common::weights()).unwrap();
    let bytes = file(&layout);
    let tensors = safetensors::SafeTensors::deserialize(&bytes).unwrap();
    let codes = tensors.tensor("embed_tokens.weight.codes").unwrap();
    assert_eq!((codes.dtype(), codes.shape()), (safetensors::Dtype::U8, &[96, 32][..]));
    assert_eq!(codes.data()[..4], [0, 1, 2, 3]);
    assert_eq!(layout.header.len() as u64 % DATA_ALIGNMENT, 0);
    for (_, offset) in layout.weights.iter().flatten() {
        assert_eq!(offset % TENSOR_ALIGNMENT, 0);
    }
    let (_, metadata) = safetensors::SafeTensors::read_metadata(&bytes).unwrap();
    let metadata = metadata.metadata().clone().unwrap();
    let description: Description = serde_json::from_str(&metadata["embed_tokens.weight"]).unwrap();
    assert_eq!(description.dims, [96, 64]);
    assert_eq!(description.encoding, common::weights()[0].2);
}

#[test]
fn weights_are_located_where_they_were_laid() {
    let layout = Layout::new(&common::weights()).unwrap();
    let bytes = file(&layout);
    let header = parse(&bytes).unwrap();
    header.check(&layout.header_digest(), layout.length).unwrap();
    for (weight, parts) in common::program().weights.iter().zip(&layout.weights) {
        let expected: Vec<(u64, u64)> =
            parts.iter().map(|(part, at)| (*at, at + part.bytes())).collect();
        assert_eq!(header.locate(weight).unwrap(), expected);
    }
}

#[test]
fn other_weights_and_other_shapes_are_named() {
    let layout = Layout::new(&common::weights()).unwrap();
    let header = parse(&file(&layout)).unwrap();
    assert!(matches!(header.check(&[0; 32], layout.length), Err(Error::OtherWeights { .. })));
    let mut weight = common::program().weights[2].clone();
    weight.dims = vec![64, 64];
    assert!(header.locate(&weight).unwrap_err().to_string().contains("k_proj.weight"));
    weight.name = "missing.weight".to_owned();
    assert!(header.locate(&weight).unwrap_err().to_string().contains("has no tensor"));
}

#[test]
fn wrong_lengths_and_kinds_are_refused() {
    let layout = Layout::new(&common::weights()).unwrap();
    let mut bytes = file(&layout);
    for length in [8, 100, layout.header.len(), bytes.len() - 1] {
        assert!(matches!(parse(&bytes[..length]), Err(Error::Truncated { .. })), "{length}");
    }
    bytes.push(0);
    assert!(matches!(parse(&bytes), Err(Error::Trailing { extra: 1 })));
    for first in [*b"GGUF\x03\0\0\0", gemma4_format::pte::MAGIC, *b"\x1c\0\0\0FT01"] {
        assert!(matches!(Header::size(1 << 20, first), Err(Error::WrongKind { .. })));
    }
    assert!(Header::size(u64::MAX, [0xff; 8]).is_err());
}

#[test]
fn header_flips_never_pass_the_digest() {
    let layout = Layout::new(&common::weights()).unwrap();
    let mut bytes = file(&layout);
    for bit in 0..layout.header.len() * 8 {
        bytes[bit / 8] ^= 1 << (bit % 8);
        let accepted = parse(&bytes)
            .and_then(|header| header.check(&layout.header_digest(), bytes.len() as u64));
        assert!(accepted.is_err(), "accepted with bit {bit} flipped");
        bytes[bit / 8] ^= 1 << (bit % 8);
    }
}

#[test]
fn a_tensor_as_long_as_the_address_space_is_refused() {
    let json =
        format!(r#"{{"a":{{"dtype":"U8","shape":[{0}],"data_offsets":[0,{0}]}}}}"#, u64::MAX - 20);
    let mut bytes = (json.len() as u64).to_le_bytes().to_vec();
    bytes.extend(json.into_bytes());
    assert!(parse(&bytes).is_err());
}
