//! Random numbers, distances and a few conversions.

use half::{bf16, f16};

/// splitmix64 (Steele, Lea, Flood, 2014).
pub(crate) struct Random(pub(crate) u64);

impl Random {
    pub(crate) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    pub(crate) fn below(&mut self, n: u32) -> u32 {
        (self.next() >> 32) as u32 % n
    }

    pub(crate) fn uniform(&mut self) -> f32 {
        (self.next() >> 40) as f32 / (1u32 << 24) as f32
    }

    /// Roughly normal, deviation 1.
    pub(crate) fn normal(&mut self) -> f32 {
        (0..12).map(|_| self.uniform()).sum::<f32>() - 6.0
    }

    pub(crate) fn normals(&mut self, count: usize) -> Vec<f32> {
        (0..count).map(|_| self.normal()).collect()
    }

    /// Normal numbers, of which one in a hundred channels is 1000 times larger.
    pub(crate) fn activations(&mut self, rows: usize, columns: usize) -> Vec<f32> {
        let mut x = self.normals(rows * columns);
        for _ in 0..columns.div_ceil(100) {
            let channel = self.below(columns as u32) as usize;
            for row in 0..rows {
                x[row * columns + channel] *= 1000.0;
            }
        }
        x
    }
}

/// ‖got − wanted‖ / ‖wanted‖; infinite if anything is not a number.
pub(crate) fn distance(got: &[f32], wanted: &[f64]) -> f64 {
    assert_eq!(got.len(), wanted.len());
    let pairs = got.iter().zip(wanted);
    let (mut difference, mut norm) = (0.0, 0.0);
    for (got, wanted) in pairs {
        difference += (f64::from(*got) - wanted).powi(2);
        norm += wanted * wanted;
    }
    if difference.is_nan() { f64::INFINITY } else { (difference / norm.max(1e-300)).sqrt() }
}

pub(crate) fn to_bf16(values: &[f32]) -> Vec<u16> {
    values.iter().map(|x| bf16::from_f32(*x).to_bits()).collect()
}

pub(crate) fn from_bf16(bits: u16) -> f32 {
    bf16::from_bits(bits).to_f32()
}

/// Little-endian bytes of `values` in a stored type.
pub(crate) fn bytes_of(dtype: gemma4_format::DType, values: &[f32]) -> Vec<u8> {
    use gemma4_format::DType;
    let bytes = |x: &f32| match dtype {
        DType::F32 => x.to_le_bytes().to_vec(),
        DType::F16 => f16::from_f32(*x).to_le_bytes().to_vec(),
        DType::BF16 => bf16::from_f32(*x).to_le_bytes().to_vec(),
        DType::U8 => vec![*x as u8],
    };
    values.iter().flat_map(bytes).collect()
}
